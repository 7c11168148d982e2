/* How many cases of long lists run under sanitizers. */
#ifndef TEST_THINNED_H
#define TEST_THINNED_H

/* The step of a loop over cases, or what a length or a number of repetitions is divided by: 1, but `step` under
   sanitizers. They look for wrong accesses and conversions, which depend on code and shapes; what depends on values is
   tested without them. A step that has no factor in common with a list's periods meets all of its choices. */
#ifdef TEST_SANITIZED
#define THINNED(step) (step)
#else
#define THINNED(step) 1
#endif

#endif
