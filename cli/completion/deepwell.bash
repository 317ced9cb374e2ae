# Completion of `deepwell` for bash.
_deepwell() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W 'bench doctor dryrun emulate explain export graph parity plan probe reshard run train --help --version' -- "$word")
        return
    fi
    case ${COMP_WORDS[1]} in
    bench)
        local options='step attention gemm moe memory --model --precision --batch-size --seq-len --num-experts
            --size --heads --head-dim --hidden --width --top-k --tokens --load --capacity-factor --iterations
            --device --json --help'
        mapfile -t COMPREPLY < <(
            compgen -W "$options" -- "$word"
            compgen -f -- "$word"
        )
        ;;
    export)
        mapfile -t COMPREPLY < <(
            compgen -W '--checkpoint --output --dtype --precision --no-tokenizer --json --help' -- "$word"
            compgen -f -- "$word"
        )
        ;;
    reshard)
        local options='--output --tied --flat --like --step --model-key --optimizer-key --json --help'
        mapfile -t COMPREPLY < <(
            compgen -W "$options" -- "$word"
            compgen -f -- "$word"
        )
        ;;
    run)
        local options='--prompt --tokens --max-tokens --temperature --top-k --top-p --seed --ignore-end --device
            --dtype --json --help'
        mapfile -t COMPREPLY < <(
            compgen -W "$options" -- "$word"
            compgen -f -- "$word"
        )
        ;;
    graph)
        mapfile -t COMPREPLY < <(
            compgen -W '--passes --sizes --plan --grad --precision --json --help' -- "$word"
            compgen -f -- "$word"
        )
        ;;
    train)
        local options='--model --init --data --val --val-every --val-batches --token-type
            --no-shuffle --sequence --batch --micro-batch --seed --no-dropout --steps
            --warmup --schedule --schedule-steps --lr --min-lr-ratio --betas --eps --weight-decay --decay-all --clip
            --max-bad-steps --spike-factor --spike-window --plan --precision --device --checkpoint --save-every --keep
            --resume --output --overwrite
            --log --report-every --json --dry-run --help'
        mapfile -t COMPREPLY < <(
            compgen -W "$options" -- "$word"
            compgen -f -- "$word"
        )
        ;;
    dryrun)
        mapfile -t COMPREPLY < <(
            compgen -W '--plan --trace --report --html --json --help' -- "$word"
            compgen -f -- "$word"
        )
        ;;
    emulate)
        mapfile -t COMPREPLY < <(
            compgen -W '--arch --seed --no-check --report --threads --multiprocessors --endless --help --' -- "$word"
            compgen -f -- "$word"
        )
        ;;
    explain)
        mapfile -t COMPREPLY < <(
            compgen -W 'attention gemm kernels --backward --target --measure --json --help' -- "$word"
        )
        ;;
    parity)
        local options='--model --init --data --held-out --token-type --precision --steps --seeds --batch --micro-batch
            --sequence --lr --warmup --schedule --no-dropout --bar --device --output --fresh --json --help'
        mapfile -t COMPREPLY < <(
            compgen -W "$options" -- "$word"
            compgen -f -- "$word"
        )
        ;;
    plan)
        local options='--model --hardware --seq-len --global-batch --precision --set --reserve
            --bold --explain --json --output --help'
        mapfile -t COMPREPLY < <(
            compgen -W "$options" -- "$word"
            compgen -f -- "$word"
        )
        ;;
    probe)
        mapfile -t COMPREPLY < <(
            compgen -W '--json --measure --hardware --output --help' -- "$word"
            compgen -f -- "$word"
        )
        ;;
    doctor) mapfile -t COMPREPLY < <(compgen -W '--json --help' -- "$word") ;;
    esac
}
complete -F _deepwell deepwell
