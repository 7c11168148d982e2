#include "cli/llmc/tokenizer.h"

#include "cli/base/cli.h"
#include "cli/llmc/file.h"
#include "cli/train/durable.h"

#include <stdlib.h>
#include <string.h>

enum { VERSION = 2, GPT2_END = 50256, MOST_TOKENS = 1 << 20, LONGEST = 255 };
static const char END_TEXT[] = "<|endoftext|>";

static bool no_memory(void) {
    cli_fail(CLI_FAILURE, "no memory for tokens");
    return false;
}

/* ---- from bytes to ids ---- */

static uint64_t hash_of(const unsigned char *b, int64_t n) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (int64_t i = 0; i < n; ++i) hash = (hash ^ b[i]) * 0x100000001b3ull;
    return hash ^ hash >> 29;
}

/* The slot of these bytes, or a free one. */
static uint64_t slot_of(const tokenizer *t, const unsigned char *b, int64_t n) {
    uint64_t slot = hash_of(b, n) & t->mask;
    for (; t->slots[slot] >= 0; slot = (slot + 1) & t->mask) {
        int64_t length;
        const unsigned char *const text = tokenizer_text(t, t->slots[slot], &length);
        if (length == n && memcmp(text, b, (size_t)n) == 0) break;
    }
    return slot;
}

/* Of equal tokens the first counts. */
static bool make_slots(tokenizer *t) {
    t->mask = 1;
    while (t->mask < 2 * (uint64_t)t->n) t->mask *= 2;
    t->slots = malloc((size_t)t->mask * sizeof *t->slots);
    if (!t->slots) return no_memory();
    for (uint64_t i = 0; i < t->mask; ++i) t->slots[i] = -1;
    t->mask -= 1;
    for (int64_t i = 0; i < t->n; ++i) {
        int64_t length;
        const unsigned char *const text = tokenizer_text(t, i, &length);
        const uint64_t slot = slot_of(t, text, length);
        if (i != t->end && t->slots[slot] < 0) t->slots[slot] = (int32_t)i;
    }
    return true;
}

static int32_t find(const tokenizer *t, const unsigned char *b, int64_t n) {
    return n > LONGEST ? -1 : t->slots[slot_of(t, b, n)];
}

/* ---- files ---- */

static bool read_tokens(tokenizer *t, llmc_file *f) {
    int64_t offset = LLMC_HEADER_BYTES, used = 0;
    if (!llmc_expect(f, 0, LLMC_TOKENIZER, "the first word (a tokenizer's)") ||
        !llmc_in_range(f, 1, 1, VERSION, "the version") || !llmc_in_range(f, 2, 2, MOST_TOKENS, "the number of tokens"))
        return false;
    t->n = f->header[2];
    const bool old = f->header[1] == 1; /* its end is GPT-2's */
    if (old && t->n != GPT2_END + 1) return llmc_expect(f, 2, GPT2_END + 1, "the number of tokens (of version 1)");
    if (!old && !llmc_in_range(f, 3, 0, t->n - 1, "the token of a document's end")) return false;
    t->end = old ? GPT2_END : f->header[3];
    t->bytes = malloc((size_t)f->size);
    t->at = malloc((size_t)(t->n + 1) * sizeof *t->at);
    if (!t->bytes || !t->at) return no_memory();
    for (int64_t i = 0; i < t->n; ++i) {
        unsigned char length;
        t->at[i] = used;
        if (!llmc_read(f, offset, &length, 1)) return false;
        if (length == 0)
            return llmc_fail(f->path, offset, "token %lld has no bytes, 1..255 are expected", (long long)i);
        if (!llmc_read(f, offset + 1, t->bytes + used, length)) return false;
        used += length;
        offset += 1 + length;
    }
    t->at[t->n] = used;
    return llmc_has_bytes(f, offset);
}

bool tokenizer_read(tokenizer *t, const char *path) {
    llmc_file f;
    *t = (tokenizer){.path = path};
    if (!llmc_open(&f, path)) return false;
    const bool ok = read_tokens(t, &f) && make_slots(t);
    llmc_close(&f);
    if (!ok) tokenizer_free(t);
    return ok;
}

bool tokenizer_of_bytes(tokenizer *t) {
    enum { BYTES = 256 };
    *t = (tokenizer){.n = BYTES + 1, .end = BYTES};
    t->bytes = malloc(BYTES + sizeof END_TEXT);
    t->at = malloc((BYTES + 2) * sizeof *t->at);
    bool ok = (t->bytes && t->at) || no_memory();
    if (ok) {
        for (int i = 0; i < BYTES; ++i) t->bytes[i] = (unsigned char)i;
        for (int i = 0; i <= BYTES; ++i) t->at[i] = i;
        memcpy(t->bytes + BYTES, END_TEXT, sizeof END_TEXT);
        t->at[BYTES + 1] = BYTES + (int64_t)sizeof END_TEXT - 1;
        ok = make_slots(t);
    }
    if (!ok) tokenizer_free(t);
    return ok;
}

bool tokenizer_put(const tokenizer *t, durable_stream *s) {
    unsigned char header[LLMC_HEADER_BYTES];
    llmc_header(header, (const int32_t[]){LLMC_TOKENIZER, VERSION, (int32_t)t->n, t->end}, 4);
    bool ok = durable_append(s, header, sizeof header);
    for (int64_t i = 0; ok && i < t->n; ++i) {
        int64_t length;
        const unsigned char *const text = tokenizer_text(t, i, &length);
        const unsigned char size = (unsigned char)length;
        ok = durable_append(s, &size, 1) && durable_append(s, text, (size_t)length);
    }
    return ok;
}

void tokenizer_free(tokenizer *t) {
    free(t->bytes);
    free(t->at);
    free(t->slots);
    *t = (tokenizer){.n = 0};
}

bool token_list_add(token_list *l, uint32_t token) {
    if (l->n == l->capacity) {
        const int64_t capacity = 2 * l->capacity + 1024;
        uint32_t *const larger = realloc(l->token, (size_t)capacity * sizeof *larger);
        if (!larger) return no_memory();
        l->token = larger;
        l->capacity = capacity;
    }
    l->token[l->n++] = token;
    return true;
}

/* ---- merging ---- */

/* Two neighbours whose joint bytes are a token. */
typedef struct pair {
    int32_t token;
    int64_t left, end; /* bytes left..end-1 of the piece */
} pair;

/* Parts of a piece: the part that begins at i ends before next[i] and follows the one at before[i]. A pair in the heap
   is out of date when one of its parts has been merged. */
typedef struct merging {
    const tokenizer *t;
    const unsigned char *piece;
    int64_t n, capacity;
    int64_t *next, *before;
    pair *heap;
    int64_t pairs;
} merging;

static bool is_less(const pair *a, const pair *b) {
    return a->token < b->token || (a->token == b->token && a->left < b->left);
}

/* Each merge adds at most two pairs: 3 n are enough. */
static void push(merging *m, int64_t left) {
    const int64_t middle = m->next[left];
    if (middle >= m->n) return;
    const pair p = {find(m->t, m->piece + left, m->next[middle] - left), left, m->next[middle]};
    if (p.token < 0) return;
    int64_t i = m->pairs++;
    for (; i > 0 && is_less(&p, &m->heap[(i - 1) / 2]); i = (i - 1) / 2) m->heap[i] = m->heap[(i - 1) / 2];
    m->heap[i] = p;
}

static pair pop(merging *m) {
    const pair top = m->heap[0], p = m->heap[--m->pairs];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < m->pairs; i = child) {
        if (child + 1 < m->pairs && is_less(&m->heap[child + 1], &m->heap[child])) child += 1;
        if (!is_less(&m->heap[child], &p)) break;
        m->heap[i] = m->heap[child];
    }
    m->heap[i] = p;
    return top;
}

static bool is_current(const merging *m, const pair *p) {
    if (m->next[p->left] < 0) return false;
    const int64_t middle = m->next[p->left];
    return middle < m->n && m->next[middle] == p->end;
}

static bool reserve(merging *m, int64_t n) {
    if (n <= m->capacity) return true;
    const int64_t capacity = 2 * n;
    free(m->next), free(m->before), free(m->heap);
    m->next = malloc((size_t)capacity * sizeof *m->next);
    m->before = malloc((size_t)capacity * sizeof *m->before);
    m->heap = malloc(3 * (size_t)capacity * sizeof *m->heap);
    m->capacity = m->next && m->before && m->heap ? capacity : 0;
    return m->capacity > 0 || no_memory();
}

static bool encode_piece(merging *m, const unsigned char *piece, int64_t n, token_list *to) {
    const int32_t whole = find(m->t, piece, n);
    if (whole >= 0) return token_list_add(to, (uint32_t)whole);
    if (!reserve(m, n)) return false;
    m->piece = piece, m->n = n, m->pairs = 0;
    for (int64_t i = 0; i < n; ++i) m->next[i] = i + 1, m->before[i] = i - 1;
    for (int64_t i = 0; i < n; ++i) push(m, i);
    while (m->pairs > 0) {
        const pair p = pop(m);
        if (!is_current(m, &p)) continue;
        m->next[m->next[p.left]] = -1; /* this part is gone */
        m->next[p.left] = p.end;
        if (p.end < n) m->before[p.end] = p.left;
        push(m, p.left);
        if (m->before[p.left] >= 0) push(m, m->before[p.left]);
    }
    for (int64_t i = 0; i < n; i = m->next[i]) {
        const int32_t token = find(m->t, piece + i, m->next[i] - i);
        if (token < 0) {
            cli_fail(CLI_FAILURE, "%s has no token for the byte %d: it cannot encode", m->t->path, piece[i]);
            return false;
        }
        if (!token_list_add(to, (uint32_t)token)) return false;
    }
    return true;
}

/* ---- pieces ---- */

#include "cli/llmc/unicode.inc"

enum kind { LETTER, NUMBER, SPACE, OTHER };

static bool is_in(const uint32_t (*ranges)[2], size_t n, uint32_t code) {
    size_t low = 0, high = n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (ranges[middle][1] < code)
            low = middle + 1;
        else
            high = middle;
    }
    return low < n && ranges[low][0] <= code;
}

/* Unicode's White_Space. */
static bool is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

/* The code at b[0..n-1], n >= 1, and its bytes; a byte that begins no valid UTF-8 is itself, beyond Unicode. */
static uint32_t decode(const unsigned char *b, int64_t n, int64_t *length) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const int64_t size = b[0] < 0x80 ? 1 : b[0] < 0xc2 ? 0 : b[0] < 0xe0 ? 2 : b[0] < 0xf0 ? 3 : b[0] < 0xf5 ? 4 : 0;
    uint32_t code = size == 1 ? b[0] : size == 2 ? b[0] & 31u : size == 3 ? b[0] & 15u : b[0] & 7u;
    bool valid = size > 0 && size <= n;
    for (int64_t i = 1; valid && i < size; ++i) {
        valid = b[i] >> 6 == 2;
        code = code << 6 | (b[i] & 63u);
    }
    valid = valid && code >= least[size] && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
    *length = valid ? size : 1;
    return valid ? code : 0x110000u + b[0];
}

static enum kind kind_at(const unsigned char *b, int64_t n, int64_t *length) {
    const uint32_t code = decode(b, n, length);
    if (is_space(code)) return SPACE;
    if (is_in(letters, sizeof letters / sizeof *letters, code)) return LETTER;
    return is_in(numbers, sizeof numbers / sizeof *numbers, code) ? NUMBER : OTHER;
}

static int64_t contraction(const unsigned char *b, int64_t n) {
    static const char *const list[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; i < sizeof list / sizeof *list; ++i) {
        const size_t length = strlen(list[i]);
        if ((int64_t)length <= n && memcmp(b, list[i], length) == 0) return (int64_t)length;
    }
    return 0;
}

/* The end of a run of one kind that begins at i, and where its last character begins. */
static int64_t run_end(const unsigned char *b, int64_t n, int64_t i, enum kind of, int64_t *last) {
    for (int64_t length; i < n && kind_at(b + i, n - i, &length) == of; i += length) *last = i;
    return i;
}

/* The length of the first piece of b[0..n-1], n >= 1. */
static int64_t piece_length(const unsigned char *b, int64_t n) {
    int64_t length, last = 0;
    const int64_t short_form = contraction(b, n);
    if (short_form > 0) return short_form;
    const int64_t word = b[0] == ' ' && n > 1 ? 1 : 0;
    const enum kind kind = kind_at(b + word, n - word, &length);
    if (kind != SPACE) return run_end(b, n, word, kind, &last);
    const int64_t end = run_end(b, n, 0, SPACE, &last);
    return end == n || last == 0 ? end : last; /* the last space belongs to what follows */
}

bool tokenizer_encode(const tokenizer *t, const unsigned char *text, int64_t n, token_list *to) {
    merging m = {.t = t};
    bool ok = true;
    for (int64_t i = 0, length; ok && i < n; i += length) {
        length = piece_length(text + i, n - i);
        ok = encode_piece(&m, text + i, length, to);
    }
    free(m.next), free(m.before), free(m.heap);
    return ok;
}
