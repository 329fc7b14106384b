/* All decoder layers of a Llama-like model in one call: see decoder_stack.py.
 *
 * Between two matrix products of a small batch there is less work than a call from Python takes.
 */
#include <time.h>

#include "paged_attention.c"
#include "elementwise.c"
#include "tiled_linear.h"

/* Norms of heads may be NULL. tap: where the layer's output goes, a row every tap_stride, or NULL. */
typedef struct {
    Linear qkv, out, gate_up, down;
    const element *norm, *mlp_norm, *q_norm, *k_norm;
    element *k_pages, *v_pages, *tap;
    int64_t window;
    float scale, eps;
    int32_t causal;
} StackLayer;

typedef struct { int64_t num_layers, tokens, hidden, heads, kv_heads, tap_stride; } Shape;

/* Parts of one piece of memory, in the order of their use. */
typedef struct { element *normed, *qkv, *rotated, *mixed, *projected, *gate_up, *gated, *other; } Scratch;

static Scratch divide(element *memory, const StackLayer *layer, const Shape *shape) {
    const int64_t heads = shape->heads + shape->kv_heads;
    const int64_t widths[] = {
        shape->hidden, layer->qkv.outputs, heads * HEAD_DIM, shape->heads * HEAD_DIM,
        shape->hidden, layer->gate_up.outputs, layer->down.inputs,
    };
    element *parts[8];
    for (int part = 0; part < 8; part++) {
        parts[part] = memory;
        if (part < 7) memory += shape->tokens * widths[part];
    }
    return (Scratch){parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], parts[7]};
}

static int32_t attend(const Step *step, const StackLayer *layer, const Shape *shape, const Scratch *at,
                      const element *cos, const element *sin) {
    const int64_t heads = shape->heads, kv_heads = shape->kv_heads, stride = layer->qkv.outputs;
    const int64_t turned = (heads + kv_heads) * HEAD_DIM;
    rotate(at->qkv, layer->q_norm, layer->k_norm, cos, sin, at->rotated, shape->tokens, stride, heads,
           kv_heads, HEAD_DIM, layer->eps);
    const Layer attention = {
        .q = at->rotated, .k = at->rotated + heads * HEAD_DIM, .v = at->qkv + turned, .out = at->mixed,
        .k_pages = layer->k_pages, .v_pages = layer->v_pages,
        .q_token = turned, .q_head = HEAD_DIM, .k_token = turned, .k_head = HEAD_DIM,
        .v_token = stride, .v_head = HEAD_DIM,
        .num_heads = heads, .num_kv_heads = kv_heads, .window = layer->window,
        .scale = layer->scale, .softcap = 0.0f, .causal = layer->causal,
    };
    store_kv(step, &attention);
    return paged_attention(step, &attention);
}

static void add(const element *restrict x, const element *restrict y, element *restrict sum, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] = narrow(widen(x[i]) + widen(y[i]));
}

enum { PRODUCTS, ATTENTION, BETWEEN }; /* what seconds are counted for */

/* Adds the seconds since the last call to a part's. */
static void spent(double *seconds, int part, double *since) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double at = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    seconds[part] += at - *since;
    *since = at;
}

/* `x`, [token][hidden], goes in and comes out; `seconds` are added to. Returns 0, or 1 when memory ran out. */
int32_t decoder_stack(const Step *step, const StackLayer *layers, const Shape *shape, element *x,
                      const element *cos, const element *sin, element *memory, double *seconds) {
    double since = 0.0, nothing[1] = {0.0};
    spent(nothing, 0, &since);
    const int64_t tokens = shape->tokens, hidden = shape->hidden;
    const Scratch at = divide(memory, layers, shape);
    rms_norm(x, layers->norm, at.normed, tokens, hidden, layers->eps);
    spent(seconds, BETWEEN, &since);
    for (int64_t l = 0; l < shape->num_layers; l++) {
        const StackLayer *layer = layers + l;
        linear_rows(&layer->qkv, at.normed, at.qkv, tokens);
        spent(seconds, PRODUCTS, &since);
        if (attend(step, layer, shape, &at, cos, sin) != 0) return 1;
        spent(seconds, ATTENTION, &since);
        linear_rows(&layer->out, at.mixed, at.projected, tokens);
        spent(seconds, PRODUCTS, &since);
        add_rms_norm(at.projected, x, layer->mlp_norm, at.other, at.normed, tokens, hidden, layer->eps);
        spent(seconds, BETWEEN, &since);
        linear_rows(&layer->gate_up, at.normed, at.gate_up, tokens);
        spent(seconds, PRODUCTS, &since);
        silu_mul(at.gate_up, at.gated, tokens, layer->down.inputs);
        spent(seconds, BETWEEN, &since);
        linear_rows(&layer->down, at.gated, at.projected, tokens);
        spent(seconds, PRODUCTS, &since);
        if (l + 1 < shape->num_layers)
            add_rms_norm(at.projected, at.other, layer[1].norm, x, at.normed, tokens, hidden, layer[1].eps);
        else
            add(at.projected, at.other, x, tokens * hidden);
        for (int64_t t = 0; layer->tap && t < tokens; t++)
            memcpy(layer->tap + t * shape->tap_stride, x + t * hidden, sizeof(element) * hidden);
        spent(seconds, BETWEEN, &since);
    }
    return 0;
}
