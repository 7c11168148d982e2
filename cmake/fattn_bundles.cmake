# Instances of a family are compiled a few at a time: most of a small kernel's compilation is to read CUDA's headers. A
# bundle reads them once, and then each instance in a namespace of its own. As all of an instance's code depends on its
# macros, it reads the device headers anew: after each instance their macros, include guards among them, are undefined.
set(bundle_size 6)
set(bundles)

# fattn_bundle(LIST GROUP NAME): the kernel's file in the build folder, NAME.cu, goes into a bundle of its group, which
# is appended to the list.
macro(fattn_bundle sources group name)
  set(key ${sources}_${group}) # of one list of architectures
  if(NOT DEFINED bundled_${key})
    set(bundled_${key} 0)
  endif()
  math(EXPR number "${bundled_${key}} / ${bundle_size}")
  math(EXPR bundled_${key} "${bundled_${key}} + 1")
  set(bundle ${PROJECT_BINARY_DIR}/kernels/bundle_${group}_${K_ARCH}_${number}.cu)
  if(NOT bundle IN_LIST bundles)
    list(APPEND bundles ${bundle})
    list(APPEND ${sources} ${bundle})
    set(text_${bundle} "#include \"bundle_headers.h\"\n")
  endif()
  string(APPEND text_${bundle} "namespace of_${name} {\n#include \"${name}.cu\"\n}\n#include \"bundle_undef.h\"\n")
endmacro()

# Writes bundles whose text has changed. The headers that device code shares with the host depend on no instance.
function(fattn_write_bundles)
  file(GLOB_RECURSE device_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/core/ptx/*.h
    ${PROJECT_SOURCE_DIR}/core/device/* ${PROJECT_SOURCE_DIR}/fwd/cuda/*.cuh ${PROJECT_SOURCE_DIR}/fwd/cuda/*.inc
    ${PROJECT_SOURCE_DIR}/bwd/cuda/*.cuh)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${device_files} cmake/instance.cu.in)
  set(headers)
  set(macros)
  foreach(file IN LISTS device_files ITEMS ${PROJECT_SOURCE_DIR}/cmake/instance.cu.in)
    file(READ ${file} text)
    string(REGEX MATCHALL "\n *# *include +(<[a-z_/0-9]+.h>|\"[a-z_/0-9]+.h\")" lines "${text}")
    list(APPEND headers ${lines})
    string(REGEX MATCHALL "\n *# *define +[A-Za-z_0-9]+" lines "${text}")
    list(APPEND macros ${lines})
  endforeach()
  list(FILTER headers EXCLUDE REGEX "\"core/ptx/")
  list(TRANSFORM macros REPLACE ".*define" "#undef")
  foreach(lines headers macros)
    list(TRANSFORM ${lines} STRIP)
    list(SORT ${lines})
    list(REMOVE_DUPLICATES ${lines})
    list(JOIN ${lines} "\n" ${lines})
  endforeach()
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/kernels/bundle_headers.h CONTENT "${headers}\n" @ONLY)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/kernels/bundle_undef.h CONTENT "${macros}\n" @ONLY)
  foreach(bundle IN LISTS bundles)
    file(CONFIGURE OUTPUT ${bundle} CONTENT "${text_${bundle}}" @ONLY)
  endforeach()
endfunction()
