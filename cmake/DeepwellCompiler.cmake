# Compiler flags that all of our targets share, as the interface library `deepwell_flags`.
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_package(Threads REQUIRED)

# deepwell_run_path(TARGET FOLDER...): where the loader looks for the libraries of an installed target. It is the same in
# the build tree. CMake rewrites other paths during the installation and makes room for that in the build tree by
# padding with ":", and the loader takes an empty entry for the current folder.
function(deepwell_run_path target)
    set(folders ${ARGN})
    list(REMOVE_DUPLICATES folders)
    set_target_properties(${target} PROPERTIES
        BUILD_WITH_INSTALL_RPATH ON
        INSTALL_RPATH "${folders}"
        INSTALL_RPATH_USE_LINK_PATH ON) # a jansson or oneDNN in a folder that the loader does not know
endfunction()

add_library(deepwell_flags INTERFACE)
target_compile_definitions(deepwell_flags INTERFACE _GNU_SOURCE)
# Contraction changes results with the compiler's mood; only the kernels in isa/ allow it.
target_compile_options(deepwell_flags INTERFACE
    -Wall -Wextra -ffp-contract=off -fno-math-errno
    $<$<BOOL:${DEEPWELL_WERROR}>:-Werror>)
if(DEEPWELL_SANITIZE)
    target_compile_options(deepwell_flags INTERFACE
        -fsanitize=${DEEPWELL_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(deepwell_flags INTERFACE -fsanitize=${DEEPWELL_SANITIZE})
endif()
if(DEEPWELL_LIBFUZZER) # tells the fuzzer which branches an input has taken
    target_compile_options(deepwell_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
