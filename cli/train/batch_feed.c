#include "cli/train/batch_feed.h"

/* ids, targets and the number lie one behind the other, the first two at multiples of so many elements, as allocated
   tensors do. */
enum { ALIGNED = 64 };

static int64_t room_of(int64_t tokens) { return (tokens + ALIGNED - 1) / ALIGNED * ALIGNED; }

static int32_t *part(const fattn_tensor *memory, int64_t offset) { return (int32_t *)memory->data + offset; }

static fattn_status create_place(fattn_ctx *ctx, int64_t room, batch_place *p) {
    const int64_t size = 2 * room + 1;
    p->cursor = BATCH_NONE;
    const fattn_status s = fattn_pinned_alloc(ctx, FATTN_I32, 1, &size, &p->memory);
    if (s) return s;
    p->ids = part(&p->memory, 0);
    p->targets = part(&p->memory, room);
    p->pass = part(&p->memory, 2 * room);
    for (int64_t i = 0; i < size; ++i) p->ids[i] = 0; /* the gaps, too, are copied */
    return fattn_mark_create(ctx, &p->sent);
}

static fattn_status create_views(batch_feed *b, const int64_t shape[2], int64_t room) {
    const int64_t size = 2 * room + 1;
    const fattn_status s = fattn_tensor_alloc(b->ctx, FATTN_I32, 1, &size, &b->memory);
    if (s) return s;
    const fattn_device device = (fattn_device)b->memory.device;
    const int32_t id = b->memory.device_id;
    b->ids = fattn_tensor_view(part(&b->memory, 0), FATTN_I32, device, id, 2, shape);
    b->targets = fattn_tensor_view(part(&b->memory, room), FATTN_I32, device, id, 2, shape);
    b->pass = fattn_tensor_view(part(&b->memory, 2 * room), FATTN_I32, device, id, 0, NULL);
    return FATTN_OK;
}

fattn_status batch_feed_create(fattn_ctx *ctx, int64_t sequences, int64_t context, batch_feed *b) {
    const int64_t shape[2] = {sequences, context}, room = room_of(sequences * context);
    *b = (batch_feed){.ctx = ctx};
    fattn_status s = create_views(b, shape, room);
    for (int i = 0; i < 2 && !s; ++i) s = create_place(ctx, room, &b->places[i]);
    if (s) batch_feed_destroy(b);
    return s;
}

void batch_feed_destroy(batch_feed *b) {
    for (int i = 0; i < 2 && b->ctx; ++i) {
        batch_place *const p = &b->places[i];
        if (p->sent) (void)!fattn_mark_wait(b->ctx, p->sent); /* the memory goes, whatever became of the copy */
        fattn_mark_destroy(b->ctx, p->sent);
        fattn_pinned_free(b->ctx, &p->memory);
    }
    if (b->ctx) fattn_tensor_free(b->ctx, &b->memory);
    *b = (batch_feed){0};
}

fattn_status batch_feed_open(batch_feed *b, batch_place **place) {
    *place = &b->places[b->next];
    return fattn_mark_wait(b->ctx, (*place)->sent);
}

fattn_status batch_feed_send(batch_feed *b, int64_t pass) {
    const batch_place *const p = &b->places[b->next];
    *p->pass = (int32_t)(uint32_t)pass; /* modulo 2^32 */
    const fattn_status s = fattn_tensor_copy(b->ctx, &b->memory, &p->memory);
    b->next = 1 - b->next;
    return s ? s : fattn_mark_set(b->ctx, p->sent);
}
