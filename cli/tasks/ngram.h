/* Baselines: n-grams of bytes with Witten-Bell smoothing (Witten and Bell 1991). */
#ifndef FATTNI_CLI_TASKS_NGRAM_H
#define FATTNI_CLI_TASKS_NGRAM_H

#include <stdbool.h>
#include <stdint.h>

enum { NGRAM_ORDERS = 6, NGRAM_MAX_VOCAB = 256 };

/* Mean of -log p(symbol | the order-1 symbols before it) over test[1..n_test-1], in nats, for the
   orders 1..6, counted on train. With h a context, h' the same without its oldest symbol, N(h) its
   occurrences and T(h) the number of different symbols seen after it,
       p(c|h) = (N(hc) + T(h) p(c|h')) / (N(h) + T(h)),   p(c|h') = 1/vocab below the first order.
   Both texts need at least two symbols below vocab <= NGRAM_MAX_VOCAB. False: no memory. */
bool ngram_losses(const uint8_t *train, int64_t n_train, const uint8_t *test, int64_t n_test, int vocab,
                  double loss[NGRAM_ORDERS]);

#endif
