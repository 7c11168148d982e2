# All from Debian: libopenblas-openmp-dev, librandom123-dev, libhdf5-dev (which brings zlib); oneDNN is optional
# (fattn_onednn.cmake).
find_package(OpenMP REQUIRED COMPONENTS C)
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(FATTN_OPENBLAS REQUIRED IMPORTED_TARGET openblas)
find_path(RANDOM123_INCLUDE Random123/philox.h REQUIRED)
# Its AES alone uses SSE, and for that every file would read all of the compiler's intrinsics.
add_compile_definitions($<$<COMPILE_LANGUAGE:C,CXX>:R123_USE_SSE=0>)
if(FATTN_BUILD_FIXTURE)
  pkg_check_modules(FATTN_HDF5 REQUIRED IMPORTED_TARGET hdf5)
  pkg_check_modules(FATTN_ZLIB REQUIRED IMPORTED_TARGET zlib)
endif()

# The pthread build of OpenBLAS would use its own thread pool in each of our tasks: slow, and its
# results depend on the number of threads.
if(NOT CMAKE_CROSSCOMPILING AND NOT DEFINED FATTN_OPENBLAS_IS_OPENMP)
  file(WRITE ${PROJECT_BINARY_DIR}/CMakeFiles/openblas_parallel.c
    "int openblas_get_parallel(void);\nint main(void) { return openblas_get_parallel() != 2; }\n")
  try_run(result compiled ${PROJECT_BINARY_DIR}/CMakeFiles/openblas_parallel
    ${PROJECT_BINARY_DIR}/CMakeFiles/openblas_parallel.c
    LINK_LIBRARIES PkgConfig::FATTN_OPENBLAS OpenMP::OpenMP_C)
  if(NOT compiled OR NOT result EQUAL 0)
    message(FATAL_ERROR "The OpenMP build of OpenBLAS is required: install libopenblas-openmp-dev; if "
      "another build is installed, too, select this one with update-alternatives.")
  endif()
  set(FATTN_OPENBLAS_IS_OPENMP ON CACHE INTERNAL "")
endif()
