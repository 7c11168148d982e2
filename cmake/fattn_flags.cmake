# Warnings, sanitizers, flags that affect floating-point results; functions that define libraries.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wno-missing-field-initializers>"
  "$<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes;-Wmissing-prototypes>")
if(CMAKE_C_COMPILER_ID MATCHES "Clang") # -Wconversion as in gcc; omp simd is only a hint
  add_compile_options(-Wno-sign-conversion -Wno-pass-failed)
endif()
# Infinities, NaN and the order of sums count, whatever CFLAGS say. Before the others: clang's resets them.
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-fno-fast-math>")
# Nobody reads errno after a function of libm: without it a square root is an instruction, and one of vectors in loops.
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-fno-math-errno>")
# gcc's pass that ends code for AVX with vzeroupper belongs to these, which -O0 and -O1 leave out: on Intel's CPUs the
# caller's code for SSE would be many times slower.
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
  add_compile_options("$<$<COMPILE_LANGUAGE:C>:-fexpensive-optimizations>")
endif()
# a*b+c is two roundings unless the code says that it is one (core/cpu/vector.inc): compilers would contract a loop's
# unrolled part and its rest differently, and each of them its own way.
add_compile_options("$<$<COMPILE_LANGUAGE:C>:-ffp-contract=off>")
if(FATTN_WERROR)
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Werror>")
endif()
if(FATTN_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${FATTN_SANITIZE};-fno-omit-frame-pointer>")
  add_link_options("$<$<LINK_LANGUAGE:C,CXX>:-fsanitize=${FATTN_SANITIZE}>")
  if(FATTN_SANITIZE MATCHES "undefined")
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=undefined>")
    if(CMAKE_C_COMPILER_ID MATCHES "Clang") # reports NULL + 0 for empty tensors, which N3322 allows
      add_compile_options(-fno-sanitize=pointer-overflow)
    endif()
  endif()
endif()
set(fattn_avx2_options -mavx2 -mfma -mf16c)
set(fattn_avx512_options -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma)
set(fattn_avx512bf16_options ${fattn_avx512_options} -mavx512bf16)
set(fattn_amx_options ${fattn_avx512bf16_options} -mamx-tile -mamx-bf16)
set(fattn_amxfp16_options ${fattn_amx_options}) # its own instruction is there by its bytes
include(CheckCCompilerFlag)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  check_c_compiler_flag(-mamx-bf16 FATTN_COMPILER_HAS_AMX) # gcc 11, clang 12: AVX512-BF16 is older
  if(FATTN_COMPILER_HAS_AMX)
    add_compile_definitions(FATTNI_HAVE_NARROW_PRODUCTS)
  endif()
endif()
# Sources are paths from the root.
function(fattn_add_objects name)
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/include
    PRIVATE ${PROJECT_SOURCE_DIR})
  target_include_directories(${name} SYSTEM PRIVATE ${RANDOM123_INCLUDE})
  foreach(source IN LISTS ARGN)
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND source MATCHES "_(avx2|avx512)\\.c$")
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${fattn_${CMAKE_MATCH_1}_options})
    endif()
    if(FATTN_COMPILER_HAS_AMX AND source MATCHES "_(avx512bf16|amx|amxfp16)\\.c$")
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${fattn_${CMAKE_MATCH_1}_options})
    endif()
    # gcc before 12.4 aligns 64-byte vectors only to 32 bytes on ASan's fake stack (gcc bug 110027).
    if(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND FATTN_SANITIZE MATCHES "address"
        AND source MATCHES "_(avx512|avx512bf16|amx|amxfp16)\\.c$")
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS --param=asan-use-after-return=0)
    endif()
  endforeach()
endfunction()

# <name>: the installed library. <name>_internal: the same objects as a static library, for tests and
# programs of this tree that use internal functions.
function(fattn_add_library name)
  add_library(${name} ${ARGN})
  add_library(${name}_internal STATIC ${ARGN})
  foreach(library ${name} ${name}_internal)
    target_include_directories(${library} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
      $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    set_target_properties(${library} PROPERTIES LINKER_LANGUAGE C)
  endforeach()
  set_target_properties(${name} PROPERTIES VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  if(BUILD_SHARED_LIBS AND NOT FATTN_SANITIZE)
    target_link_options(${name} PRIVATE -Wl,-z,defs)
  endif()
endfunction()
