/* Keys in pages, from keys that lie one after the other: pages in a shuffled order, NaN in what is not in use, -1 in
   entries of the table that are not. */
#ifndef TEST_PAGES_H
#define TEST_PAGES_H

#include <fattn/fattn.h>

enum pages_layout { PAGES_HEADS_OUTSIDE, PAGES_HEADS_INSIDE, PAGES_PITCH, PAGES_REVERSED, PAGES_LAYOUTS };

typedef struct pages {
    fattn_tensor k, v;  /* [pages,Hkv,page,D], [pages,Hkv,page,Dv] */
    fattn_tensor table; /* [B,n] I32 */
    void *memory[3];
} pages;

/* k, v: [B,Hkv,Sk,D], [B,Hkv,Sk,Dv] in host memory; the table has ceil(Sk / page) columns. `spare` pages belong to no
   sequence. */
pages pages_of(const fattn_tensor *k, const fattn_tensor *v, const int32_t *lengths, int64_t page, int64_t spare,
               enum pages_layout layout, uint64_t seed);
/* Without a key: every entry is given, for the whole of n * page keys of B sequences. */
pages pages_empty(fattn_dtype dtype, int64_t B, int64_t Hkv, int64_t n, int64_t page, int64_t D, int64_t Dv,
                  enum pages_layout layout, uint64_t seed);
void pages_free(pages *p);

/* Element `d` of key j of head g of sequence b, of p->k or p->v. */
double pages_get(const pages *p, const fattn_tensor *t, int64_t b, int64_t g, int64_t j, int64_t d);
int32_t *pages_entry(const pages *p, int64_t b, int64_t n);

#endif
