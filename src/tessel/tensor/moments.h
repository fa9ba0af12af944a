/* Means and variances of channels, of values of type REAL; OF makes the names of its functions. */

typedef REAL OF(lanes) __attribute__((vector_size(16)));

static double OF(total)(const OF(lanes) *sums) {
    const OF(lanes) all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = 0;
    for (size_t k = 0; k < sizeof all / sizeof(REAL); k++) total += (double)all[k];
    return total;
}

/* Σ (x − c) and Σ (x − c)² of a block, several sums side by side: a processor adds in parallel. */
static void OF(around)(const REAL *x, size_t count, REAL c, double *first, double *second) {
    enum { WIDTH = 16 / sizeof(REAL), STEP = SUMS * WIDTH };
    OF(lanes) sums[SUMS] = {{0}}, squares[SUMS] = {{0}}, v;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP)
        for (int k = 0; k < SUMS; k++) {
            memcpy(&v, x + i + k * WIDTH, sizeof v);
            v -= c;
            sums[k] += v;
            squares[k] += v * v;
        }
    *first = OF(total)(sums), *second = OF(total)(squares);
    for (; i < count; i++) {
        const double distance = (double)x[i] - (double)c;
        *first += distance, *second += distance * distance;
    }
}

/* What the definitions give, where a value is infinite or too large to be squared. */
static void OF(plainly)(const REAL *x, size_t rows, size_t stride, size_t length, double *mean,
                        double *variance) {
    const double count = (double)rows * (double)length;
    double sum = 0, squares = 0;
    for (size_t n = 0; n < rows; n++)
        for (size_t i = 0; i < length; i++) sum += (double)x[n * stride + i];
    *mean = sum / count;
    for (size_t n = 0; n < rows; n++)
        for (size_t i = 0; i < length; i++) {
            const double distance = (double)x[n * stride + i] - *mean;
            squares += distance * distance;
        }
    *variance = squares / count;
}

/* Of one channel: rows of `length` values, each `stride` after the one before.

   A block is summed about the mean of those before it. If its own lies far from that, digits of its
   variance cancel, but then the distance of the two means is most of the variance of all. The first
   block has none before it, and is read twice; means are kept as distances from its mean, rounded. */
static void OF(channel)(const REAL *x, size_t rows, size_t stride, size_t length, REAL *mean,
                        REAL *variance) {
    double count = 0, origin = 0, m = 0, squares = 0, first, second;
    for (size_t n = 0; n < rows; n++)
        for (size_t i = 0; i < length; i += BLOCK) {
            const double size = (double)(length - i < BLOCK ? length - i : BLOCK);
            const REAL *block = x + n * stride + i;
            if (!count) {
                OF(around)(block, (size_t)size, 0, &first, &second);
                origin = (double)(REAL)(first / size);
            }
            const REAL centre = (REAL)(origin + m);
            OF(around)(block, (size_t)size, centre, &first, &second);
            const double off = first / size, away = (double)centre - origin + off - m;
            /* Chan's formula for two sets of values */
            const double all = count + size;
            squares += second - first * off + away * away * count * size / all;
            m += away * size / all;
            count = all;
        }
    m += origin;
    double v = squares / count;
    if (!isfinite(m) || !isfinite(v)) OF(plainly)(x, rows, stride, length, &m, &v);
    *mean = (REAL)m, *variance = (REAL)(v < 0 ? 0 : v);
}

static void OF(moments)(const REAL *x, REAL *found, size_t rows, size_t channels, size_t length) {
    for (size_t c = 0; c < channels; c++)
        OF(channel)(x + c * length, rows, channels * length, length, found + c, found + channels + c);
}
