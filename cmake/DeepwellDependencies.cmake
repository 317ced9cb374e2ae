# Libraries that Deepwell needs. Each is found by header and library, because the distributions' own package files
# differ between releases or are absent.

function(deepwell_find_library target header library)
    find_path(${target}_INCLUDE_DIR ${header})
    find_library(${target}_LIBRARY NAMES ${library})
    mark_as_advanced(${target}_INCLUDE_DIR ${target}_LIBRARY)
    if(${target}_INCLUDE_DIR AND ${target}_LIBRARY)
        add_library(${target} UNKNOWN IMPORTED GLOBAL)
        set_target_properties(${target} PROPERTIES
            IMPORTED_LOCATION ${${target}_LIBRARY}
            INTERFACE_INCLUDE_DIRECTORIES ${${target}_INCLUDE_DIR})
    endif()
endfunction()

if(DEEPWELL_STATIC_DEPS)
    deepwell_find_library(deepwell_jansson jansson.h libjansson.a)
else()
    deepwell_find_library(deepwell_jansson jansson.h jansson)
endif()
if(NOT TARGET deepwell_jansson)
    message(FATAL_ERROR
        "jansson (JSON) was not found: install its development package "
        "(Debian and Ubuntu: libjansson-dev), then configure again")
endif()
if(DEEPWELL_STATIC_DEPS)
    include(CheckCSourceCompiles)
    file(READ ${CMAKE_CURRENT_LIST_DIR}/jansson_archive.c source)
    set(CMAKE_REQUIRED_FLAGS "-shared -fPIC -Wl,--exclude-libs,ALL -Wl,--wrap=stdin")
    set(CMAKE_REQUIRED_LIBRARIES deepwell_jansson)
    check_c_source_compiles(
        "${source}\nvoid *load(const char *text);\nvoid *load(const char *text) { return json_loads(text, 0, 0); }"
        DEEPWELL_JANSSON_ARCHIVE_LINKS)
    unset(CMAKE_REQUIRED_FLAGS)
    unset(CMAKE_REQUIRED_LIBRARIES)
    if(NOT DEEPWELL_JANSSON_ARCHIVE_LINKS)
        message(FATAL_ERROR
            "${deepwell_jansson_LIBRARY} cannot be linked into a shared library: build jansson with -fPIC, name its "
            "prefix in CMAKE_PREFIX_PATH and configure a new build folder, or configure without DEEPWELL_STATIC_DEPS")
    endif()
endif()

# Header only: it is compiled in.
find_path(DEEPWELL_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(DEEPWELL_XXHASH_INCLUDE_DIR)
if(NOT DEEPWELL_XXHASH_INCLUDE_DIR)
    message(FATAL_ERROR
        "xxHash (checksums) was not found: install its development package "
        "(Debian and Ubuntu: libxxhash-dev), then configure again")
endif()
add_library(deepwell_xxhash INTERFACE)
target_include_directories(deepwell_xxhash SYSTEM INTERFACE ${DEEPWELL_XXHASH_INCLUDE_DIR})

if(NOT DEEPWELL_ONEDNN MATCHES "^(AUTO|OFF)$")
    message(FATAL_ERROR "DEEPWELL_ONEDNN is \"${DEEPWELL_ONEDNN}\": expected AUTO or OFF")
endif()
if(DEEPWELL_ONEDNN STREQUAL "AUTO")
    deepwell_find_library(deepwell_onednn oneapi/dnnl/dnnl.h dnnl)
    if(NOT TARGET deepwell_onednn)
        message(STATUS
            "oneDNN was not found: GEMMs use the portable kernel, which is slower "
            "(Debian and Ubuntu: libdnnl-dev)")
    endif()
endif()

if(DEEPWELL_TESTS)
    deepwell_find_library(deepwell_cmocka cmocka.h cmocka)
    if(NOT TARGET deepwell_cmocka)
        message(FATAL_ERROR
            "cmocka (C tests) was not found: install it (Debian and Ubuntu: libcmocka-dev), or "
            "configure with -DDEEPWELL_TESTS=OFF")
    endif()
endif()
