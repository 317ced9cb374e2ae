# Compiler flags of all targets, as the interface library `deepwell_flags`.
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_package(Threads REQUIRED)

# deepwell_run_path(TARGET FOLDER...): the folders in which the loader searches the libraries of an installed
# target. The build tree has the same ones: otherwise CMake rewrites the path at installation and reserves space in
# the build tree with ":" padding, and the loader treats an empty entry as the current folder.
function(deepwell_run_path target)
    set(folders ${ARGN})
    list(REMOVE_DUPLICATES folders)
    set_target_properties(${target} PROPERTIES
        BUILD_WITH_INSTALL_RPATH ON
        INSTALL_RPATH "${folders}"
        INSTALL_RPATH_USE_LINK_PATH ON) # a jansson or oneDNN outside of the loader's folders
endfunction()

add_library(deepwell_flags INTERFACE)
target_compile_definitions(deepwell_flags INTERFACE _GNU_SOURCE)
# Contraction makes results depend on the compiler, so only the kernels in isa/ allow it.
target_compile_options(deepwell_flags INTERFACE
    -Wall -Wextra -ffp-contract=off -fno-math-errno
    $<$<BOOL:${DEEPWELL_WERROR}>:-Werror>)
if(DEEPWELL_SANITIZE)
    target_compile_options(deepwell_flags INTERFACE
        -fsanitize=${DEEPWELL_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(deepwell_flags INTERFACE -fsanitize=${DEEPWELL_SANITIZE})
endif()
if(DEEPWELL_LIBFUZZER) # reports covered branches to the fuzzer
    target_compile_options(deepwell_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
