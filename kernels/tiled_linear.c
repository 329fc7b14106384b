/* The library of tiled_linear.py; see tiled_linear.h. */
#include "tiled_linear.h"

void tiled_linear(const element *weight, const element *bias, const element *x, element *out, int64_t rows,
                  int64_t inputs, int64_t outputs) {
    const Linear linear = {weight, bias, inputs, outputs};
    linear_rows(&linear, x, out, rows);
}
