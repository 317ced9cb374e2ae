# Installed files and their places. Included by the top CMakeLists.txt after the targets exist.
#
# Plain installs follow GNUInstallDirs. In a wheel (scikit-build-core sets SKBUILD) the library and its headers are
# inside the Python package, and the program is installed where pip puts programs.
include(CMakePackageConfigHelpers)

function(deepwell_install_wheel)
    install(TARGETS deepwell deepwell_emulator dw_fmha_bridge_min
            LIBRARY DESTINATION deepwell COMPONENT python)
    install(TARGETS ${DEEPWELL_EMULATED} LIBRARY DESTINATION deepwell/emulate COMPONENT python
            NAMELINK_SKIP)
    install(DIRECTORY include/deepwell DESTINATION deepwell/include COMPONENT python
            FILES_MATCHING PATTERN "*.h")
    if(TARGET deepwell_python)
        install(TARGETS deepwell_python LIBRARY DESTINATION deepwell COMPONENT python)
    endif()
    install(TARGETS deepwell_program
            RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
    # The wheel contains code of these two, and their licences require their notices.
    foreach(name jansson xxhash)
        set(notice /usr/share/doc/lib${name}-dev/copyright)
        if(EXISTS ${notice})
            install(FILES ${notice} DESTINATION deepwell/licenses RENAME ${name}.txt COMPONENT python)
        elseif(DEEPWELL_STATIC_DEPS)
            message(WARNING "The licence of ${name} is not in ${notice}: put it into the wheel before passing it on")
        endif()
    endforeach()
endfunction()

function(deepwell_install_system)
    install(TARGETS dw_fmha_bridge_min LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    # libdeepwell looks for the emulator in its own folder. The emulator is a component of its own, so that packages can
    # leave it out.
    install(TARGETS deepwell_emulator LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT emulator)
    install(TARGETS ${DEEPWELL_EMULATED}
            LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/deepwell/emulate COMPONENT emulator NAMELINK_SKIP)
    install(TARGETS deepwell EXPORT deepwellTargets
            LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(TARGETS deepwell_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    install(DIRECTORY include/deepwell DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
            FILES_MATCHING PATTERN "*.h")

    set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/deepwell)
    install(EXPORT deepwellTargets NAMESPACE deepwell:: DESTINATION ${package_folder})
    configure_package_config_file(cmake/deepwellConfig.cmake.in
        ${PROJECT_BINARY_DIR}/deepwellConfig.cmake INSTALL_DESTINATION ${package_folder})
    write_basic_package_version_file(${PROJECT_BINARY_DIR}/deepwellConfigVersion.cmake
        COMPATIBILITY SameMinorVersion)
    install(FILES ${PROJECT_BINARY_DIR}/deepwellConfig.cmake
                  ${PROJECT_BINARY_DIR}/deepwellConfigVersion.cmake
            DESTINATION ${package_folder})

    # Relative, so that the installed tree can be moved.
    file(RELATIVE_PATH prefix_from_pkgconfig /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    configure_file(cmake/deepwell.pc.in ${PROJECT_BINARY_DIR}/deepwell.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/deepwell.pc
            DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
    install(FILES docs/man/deepwell.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    install(FILES cli/completion/deepwell.bash
            DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME deepwell)
endfunction()

if(SKBUILD)
    deepwell_install_wheel()
else()
    deepwell_install_system()
endif()
