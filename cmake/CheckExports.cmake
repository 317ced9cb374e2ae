# Fails when LIBRARY exports a symbol that SYMBOLS does not match: "^dw_[a-z0-9]" is our public interface, dw_ but not
# dw__.
execute_process(COMMAND ${NM} --dynamic --defined-only --format=posix ${LIBRARY}
                OUTPUT_VARIABLE listing RESULT_VARIABLE result)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "${NM} could not read ${LIBRARY}")
endif()
string(REGEX MATCHALL "[^\n]+" lines "${listing}")
set(exported 0)
foreach(line IN LISTS lines)
    string(REGEX REPLACE " .*" "" symbol "${line}")
    if(NOT symbol MATCHES "${SYMBOLS}")
        message(SEND_ERROR "${symbol} is exported: make it static or leave DW_API off")
    endif()
    math(EXPR exported "${exported} + 1")
endforeach()
if(exported EQUAL 0)
    message(FATAL_ERROR "${LIBRARY} exports nothing: is DW_API on the public functions?")
endif()
