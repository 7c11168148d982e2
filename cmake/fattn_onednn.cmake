# FATTN_HAVE_ONEDNN: whether oneDNN multiplies BF16 and F32 matrices on some CPUs (core/README.md). From Debian:
# libdnnl-dev.
# Its own CMake package is not used, for Debian's needs the headers of OpenCL. The tests have run with 2.6.3 and 3.2.
set(FATTN_HAVE_ONEDNN OFF)
if(NOT FATTN_ONEDNN STREQUAL "OFF")
  find_path(ONEDNN_INCLUDE oneapi/dnnl/dnnl.h)
  find_library(ONEDNN_LIBRARY dnnl)
  mark_as_advanced(ONEDNN_INCLUDE ONEDNN_LIBRARY)
  set(problem "was not found")
  if(ONEDNN_INCLUDE AND ONEDNN_LIBRARY)
    # Other runtimes would use threads of their own in each of our tasks.
    file(STRINGS ${ONEDNN_INCLUDE}/oneapi/dnnl/dnnl_version.h lines REGEX "define DNNL_VERSION_M[AJINOR]+ ")
    string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2" ONEDNN_VERSION "${lines}")
    file(STRINGS ${ONEDNN_INCLUDE}/oneapi/dnnl/dnnl_config.h runtime
      REGEX "define DNNL_CPU_RUNTIME DNNL_RUNTIME_(OMP|SEQ)$")
    if(ONEDNN_VERSION VERSION_LESS 2.6 OR ONEDNN_VERSION VERSION_GREATER_EQUAL 4)
      set(problem "${ONEDNN_VERSION} is neither 2.6 or later nor 3")
    elseif(NOT runtime)
      set(problem "in ${ONEDNN_LIBRARY} does not use OpenMP")
    else()
      set(FATTN_HAVE_ONEDNN ON)
      message(STATUS "oneDNN: ${ONEDNN_VERSION}, ${ONEDNN_LIBRARY}")
    endif()
  endif()
  if(NOT FATTN_HAVE_ONEDNN AND FATTN_ONEDNN STREQUAL "ON")
    message(FATAL_ERROR "FATTN_ONEDNN=ON, but oneDNN ${problem} (install libdnnl-dev)")
  elseif(NOT FATTN_HAVE_ONEDNN)
    message(STATUS "oneDNN ${problem}: BF16 tensors are multiplied as F32 numbers by OpenBLAS")
  endif()
endif()
set(fattn_onednn_target)
if(FATTN_HAVE_ONEDNN)
  set(fattn_onednn_target ONEDNN::dnnl)
  add_library(ONEDNN::dnnl UNKNOWN IMPORTED) # fattn-config.cmake.in does the same
  set_target_properties(ONEDNN::dnnl PROPERTIES IMPORTED_LOCATION ${ONEDNN_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${ONEDNN_INCLUDE})
endif()
