# cmake --install: libraries, headers, find_package(fattn) and pkg-config.
include(CMakePackageConfigHelpers)

add_library(fattn::fattn ALIAS fattn)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fattn)
set(installed_targets fattn)
if(TARGET fattn_fixture)
  list(APPEND installed_targets fattn_fixture)
endif()
install(TARGETS ${installed_targets} EXPORT fattn-targets)
install(EXPORT fattn-targets NAMESPACE fattn:: DESTINATION ${package_dir})

file(GLOB public_headers CONFIGURE_DEPENDS include/fattn/*.h)
install(FILES ${public_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fattn)

configure_package_config_file(cmake/fattn-config.cmake.in fattn-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(fattn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fattn-config.cmake
  ${PROJECT_BINARY_DIR}/fattn-config-version.cmake DESTINATION ${package_dir})

# Relative to the .pc file, so that the installed tree can be moved.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_prefix "\${pcfiledir}/${pc_prefix}")
list(JOIN OPENBLAS_LDFLAGS " " openblas_libs)
set(onednn_libs)
if(FATTN_HAVE_ONEDNN)
  cmake_path(GET ONEDNN_LIBRARY PARENT_PATH onednn_folder)
  set(onednn_libs "-L${onednn_folder} -ldnnl")
endif()
list(JOIN HDF5_LDFLAGS " " hdf5_libs)
list(JOIN ZLIB_LDFLAGS " " zlib_libs)
set(pc_files fattn)
if(TARGET fattn_fixture)
  list(APPEND pc_files fattn-fixture)
endif()
foreach(name IN LISTS pc_files)
  configure_file(cmake/${name}.pc.in ${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
