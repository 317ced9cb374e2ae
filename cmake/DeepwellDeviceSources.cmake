# Device sources, and modules compiled from them, go into the library as they are: a generated C file takes in each
# file's bytes (.incbin) and lists them in the tables of src/jit/jit.h.

# Appends to PREFIX_code and PREFIX_rows of the caller.
function(deepwell_embed prefix index name path)
    string(APPEND ${prefix}_code
        "__asm__(\".pushsection .rodata\\n\\t.balign 16\\n\"\n"
        "        \"${prefix}_${index}:\\n\\t.incbin \\\"${path}\\\"\\n\"\n"
        "        \"${prefix}_${index}_end:\\n\\t.byte 0\\n\\t.popsection\");\n"
        "HIDDEN extern const unsigned char ${prefix}_${index}[], ${prefix}_${index}_end[];\n")
    string(APPEND ${prefix}_rows "    {\"${name}\", ${prefix}_${index}, ${prefix}_${index}_end},\n")
    set(${prefix}_code "${${prefix}_code}" PARENT_SCOPE)
    set(${prefix}_rows "${${prefix}_rows}" PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE device_sources CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/cuda
    ${PROJECT_SOURCE_DIR}/cuda/*.cu ${PROJECT_SOURCE_DIR}/cuda/*.cuh ${PROJECT_SOURCE_DIR}/cuda/*.h)
set(dw_source_code "")
set(dw_source_rows "")
set(index 0)
foreach(name IN LISTS device_sources)
    deepwell_embed(dw_source ${index} ${name} ${PROJECT_SOURCE_DIR}/cuda/${name})
    list(APPEND device_files ${PROJECT_SOURCE_DIR}/cuda/${name})
    math(EXPR index "${index} + 1")
endforeach()

# Modules of the commonest variants (BF16, head dimensions 64 and 128, no extras), where there is nvcc: what they save
# is seconds at first use, for which any other machine needs NVRTC. Beside each its PTX, for drivers that refuse the
# module and for who reads it; without lines of the source, which would double it.
foreach(form module ptx)
    set(dw_${form}_code "")
    set(dw_${form}_rows "")
endforeach()
set(module_files "")

# SOURCE below cuda/, then NAME=VALUE sorted by name, as dw__jit_variant_name() has them.
function(deepwell_add_module source)
    get_filename_component(stem ${source} NAME_WE)
    list(JOIN ARGN "." defines)
    set(name ${stem}.sm_90a.${defines})
    set(path ${PROJECT_BINARY_DIR}/cubins/${name})
    list(TRANSFORM ARGN PREPEND -D OUTPUT_VARIABLE flags)
    set(compile ${DEEPWELL_NVCC} -arch=sm_90a -std=c++17 ${flags}
        -I${PROJECT_SOURCE_DIR}/cuda -I${PROJECT_SOURCE_DIR}/cuda/common
        ${PROJECT_SOURCE_DIR}/cuda/${source})
    add_custom_command(OUTPUT ${path}.cubin ${path}.ptx
        COMMAND ${compile} -cubin -lineinfo -o ${path}.cubin
        COMMAND ${compile} -ptx -o ${path}.ptx
        DEPENDS ${device_files} COMMENT "Compiling ${name}" VERBATIM)
    list(LENGTH module_files index)
    deepwell_embed(dw_module ${index} ${name} ${path}.cubin)
    deepwell_embed(dw_ptx ${index} ${name} ${path}.ptx)
    list(APPEND module_files ${path}.cubin ${path}.ptx)
    set(module_files ${module_files} PARENT_SCOPE)
    foreach(form module ptx)
        set(dw_${form}_code "${dw_${form}_code}" PARENT_SCOPE)
        set(dw_${form}_rows "${dw_${form}_rows}" PARENT_SCOPE)
    endforeach()
endfunction()

# The rows X(64, ...) and X(128, ...) of a list of tiles, each as "64 ...".
function(deepwell_tile_rows header result)
    file(READ ${PROJECT_SOURCE_DIR}/cuda/${header} text)
    string(REGEX MATCHALL "X\\((64|128), [0-9, ]+\\)" matches "${text}")
    set(rows "")
    foreach(row IN LISTS matches)
        string(REGEX REPLACE "[X()]" "" row "${row}")
        string(REPLACE "," "" row "${row}")
        list(APPEND rows "${row}")
    endforeach()
    set(${result} "${rows}" PARENT_SCOPE)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/${header})
endfunction()

if(NOT DEEPWELL_CUBINS MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "DEEPWELL_CUBINS is \"${DEEPWELL_CUBINS}\": expected AUTO, ON or OFF")
endif()
if(NOT DEEPWELL_CUBINS STREQUAL "OFF")
    find_program(DEEPWELL_NVCC nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin)
    mark_as_advanced(DEEPWELL_NVCC)
    if(DEEPWELL_CUBINS STREQUAL "ON" AND NOT DEEPWELL_NVCC)
        message(FATAL_ERROR "DEEPWELL_CUBINS is ON and nvcc was not found: put it on PATH or set CUDA_HOME")
    endif()
endif()
if(DEEPWELL_NVCC AND NOT DEEPWELL_CUBINS STREQUAL "OFF")
    file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cubins)
    deepwell_add_module(common/attention_reference.cu ELEMENT=0)
    deepwell_tile_rows(sm90/attention_tiles.h rows)
    foreach(row IN LISTS rows)
        separate_arguments(row)
        list(GET row 0 head_dim)
        list(GET row 1 window)
        list(GET row 3 tile_m)
        list(GET row 4 tile_n)
        list(GET row 5 stages)
        list(GET row 6 consumers)
        deepwell_add_module(sm90/attention_forward.cu CONSUMERS=${consumers} DROPOUT=0 ELEMENT=0
            HEAD_DIM=${head_dim} PACKED=0 SOFTCAP=0 STAGES=${stages} TILE_M=${tile_m}
            TILE_N=${tile_n} WINDOW=${window})
    endforeach()
    deepwell_tile_rows(common/attention_backward_layout.h rows)
    foreach(row IN LISTS rows)
        separate_arguments(row)
        list(GET row 0 head_dim)
        list(GET row 1 window)
        list(GET row 2 tile_m)
        list(GET row 3 tile_n)
        list(GET row 4 stages_q)
        list(GET row 5 stages_do)
        list(GET row 6 consumers)
        deepwell_add_module(sm90/attention_backward.cu CONSUMERS=${consumers} DETERMINISTIC=0
            DROPOUT=0 ELEMENT=0 HEAD_DIM=${head_dim} PACKED=0 SOFTCAP=0
            STAGES_DO=${stages_do} STAGES_Q=${stages_q} TILE_M=${tile_m} TILE_N=${tile_n}
            WINDOW=${window})
    endforeach()
endif()

set(device_embedded ${PROJECT_BINARY_DIR}/src/embedded_device_sources.c)
file(GENERATE OUTPUT ${device_embedded} CONTENT
"/* Generated by cmake/DeepwellDeviceSources.cmake. */
#include \"jit/jit.h\"

#define HIDDEN __attribute__((visibility(\"hidden\")))
${dw_source_code}${dw_module_code}${dw_ptx_code}
const dw__jit_file dw__jit_sources[] = {
${dw_source_rows}    {0},
};
const dw__jit_file dw__jit_modules[] = {
${dw_module_rows}    {0},
};
const dw__jit_file dw__jit_ptx[] = {
${dw_ptx_rows}    {0},
};
")
# The compiler does not tell what the assembler reads.
set_source_files_properties(${device_embedded} PROPERTIES OBJECT_DEPENDS "${device_files};${module_files}")
