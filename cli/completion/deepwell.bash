# Completion of `deepwell` for bash.
_deepwell() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W 'doctor graph --help --version' -- "$word")
        return
    fi
    case ${COMP_WORDS[1]} in
    graph)
        mapfile -t COMPREPLY < <(
            compgen -W '--passes --sizes --plan --grad --precision --help' -- "$word"
            compgen -f -- "$word"
        )
        ;;
    doctor) mapfile -t COMPREPLY < <(compgen -W '--json --help' -- "$word") ;;
    esac
}
complete -F _deepwell deepwell
