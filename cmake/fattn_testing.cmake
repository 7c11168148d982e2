# Shared by all tests. fattn_label(TEST LABEL...): cpu or gpu; the area; package = independent of
# compiler flags, so it runs in one build only; slow = takes minutes, neither in `make test` nor under
# sanitizers.
enable_testing()
set(fattn_test_environment FATTN_BUILD=${PROJECT_BINARY_DIR} FATTN_SOURCE=${PROJECT_SOURCE_DIR}
  OMP_WAIT_POLICY=passive LC_ALL=C UBSAN_OPTIONS=print_stacktrace=1
  ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=1
  TSAN_OPTIONS=allocator_may_return_null=1:ignore_noninstrumented_modules=1 ARCHER_OPTIONS=enable=0)

set(fattn_test_timeout 300)
if(FATTN_SANITIZE)
  set(fattn_test_timeout 1500)
endif()

# Criterion counts a test that ends with a sanitizer's report as passed: hence the expression.
function(fattn_label name)
  set(timeout ${fattn_test_timeout})
  if("slow" IN_LIST ARGN)
    set(timeout 3600)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARGN}" TIMEOUT ${timeout}
    ENVIRONMENT "${fattn_test_environment}"
    FAIL_REGULAR_EXPRESSION "(Address|Leak|Thread)Sanitizer: |runtime error: ")
endfunction()
