# Compiles through ccache where it is installed, unless a launcher is set: all kernels take ten minutes on two cores.
# Paths below the source folder do not count, so that a build folder in it shares its objects with those of other
# clones.
option(FATTN_CCACHE "Compile through ccache, where it is installed" ${PROJECT_IS_TOP_LEVEL})
if(FATTN_CCACHE)
  find_program(FATTN_CCACHE_PROGRAM ccache)
  mark_as_advanced(FATTN_CCACHE_PROGRAM)
endif()
if(FATTN_CCACHE AND FATTN_CCACHE_PROGRAM)
  message(STATUS "ccache: ${FATTN_CCACHE_PROGRAM}")
  foreach(language C CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER
        ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${FATTN_CCACHE_PROGRAM})
    endif()
  endforeach()
endif()
