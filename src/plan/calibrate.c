/* The constants, fitted: robust least squares (Levenberg and Marquardt's) of the logarithm of time, in the logarithms
 * of the constants, each held to its prior. */
#include "plan/calibrate.h"
#include <math.h>
#include <string.h>

enum { MOST_STEPS = 25 };
static const double row_spread = 0.12; /* of one run's logarithm, by which priors are weighed */
static const double robust_at =
    0.15; /* residuals beyond it count by their size, not their square */
static const double derivative_step = 1e-3;

typedef struct fit {
    const dw_runs *runs;
    const uint32_t *rows;
    const double *weights;
    size_t count;
    double *jacobian, *residuals; /* count x DW__CONSTANT_COUNT; count */
} fit;

static double residual(const dw_run *run, const dw__constants *constants) {
    dw_prediction prediction;
    dw__predict(constants, &run->model, run->hardware, &run->layout, &prediction);
    return log(prediction.tokens_per_second / run->tokens_per_second);
}

/* Huber's, of a residual. */
static double robust_cost(double value) {
    double size = fabs(value);
    return size <= robust_at ? 0.5 * size * size : robust_at * (size - 0.5 * robust_at);
}

static double cost_of(const fit *f, const dw__constants *constants) {
    double cost = 0;
    for (size_t at = 0; at < f->count; at++)
        cost += f->weights[at] * robust_cost(residual(&f->runs->rows[f->rows[at]], constants)) /
                (row_spread * row_spread);
    const double *value = (const double *)constants;
    for (int k = 0; k < DW__CONSTANT_COUNT; k++) {
        double off = log(value[k] / dw__constant_table[k].prior) / dw__constant_table[k].spread;
        cost += 0.5 * off * off;
    }
    return cost;
}

/* Cholesky's; false: not positive definite. `matrix` is overwritten. */
static bool solve(double *matrix, double *vector, int n) {
    for (int i = 0; i < n; i++) {
        for (int j = 0; j <= i; j++) {
            double sum = matrix[i * n + j];
            for (int k = 0; k < j; k++) sum -= matrix[i * n + k] * matrix[j * n + k];
            if (i == j) {
                if (!(sum > 0)) return false;
                matrix[i * n + i] = sqrt(sum);
            } else {
                matrix[i * n + j] = sum / matrix[j * n + j];
            }
        }
    }
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++) vector[i] -= matrix[i * n + k] * vector[k];
        vector[i] /= matrix[i * n + i];
    }
    for (int i = n - 1; i >= 0; i--) {
        for (int k = i + 1; k < n; k++) vector[i] -= matrix[k * n + i] * vector[k];
        vector[i] /= matrix[i * n + i];
    }
    return true;
}

static void linearize(const fit *f, const dw__constants *at) {
    enum { N = DW__CONSTANT_COUNT };
    for (size_t row = 0; row < f->count; row++) {
        const dw_run *run = &f->runs->rows[f->rows[row]];
        f->residuals[row] = residual(run, at);
        for (int k = 0; k < N; k++) {
            dw__constants moved = *at;
            ((double *)&moved)[k] *= exp(derivative_step);
            f->jacobian[row * N + k] =
                (residual(run, &moved) - f->residuals[row]) / derivative_step;
        }
    }
}

static void normal_equations(const fit *f, const dw__constants *at, double *matrix,
                             double *vector) {
    enum { N = DW__CONSTANT_COUNT };
    memset(matrix, 0, sizeof *matrix * N * N);
    memset(vector, 0, sizeof *vector * N);
    for (size_t row = 0; row < f->count; row++) {
        double size = fabs(f->residuals[row]);
        double weight =
            f->weights[row] / (row_spread * row_spread) * (size > robust_at ? robust_at / size : 1);
        const double *slope = f->jacobian + row * N;
        for (int i = 0; i < N; i++) {
            vector[i] -= weight * slope[i] * f->residuals[row];
            for (int j = 0; j <= i; j++) matrix[i * N + j] += weight * slope[i] * slope[j];
        }
    }
    for (int k = 0; k < N; k++) {
        const dw__constant_row *row = &dw__constant_table[k];
        double stiff = 1 / (row->spread * row->spread);
        matrix[k * N + k] += stiff;
        vector[k] -= stiff * log(((const double *)at)[k] / row->prior);
    }
}

dw_status dw__fit_constants(const dw_runs *runs, const uint32_t *rows, const double *weights,
                            size_t count, dw__constants *constants) {
    enum { N = DW__CONSTANT_COUNT };
    fit f = {runs,
             rows,
             weights,
             count,
             dw__malloc(sizeof(double) * (count + 1) * N),
             dw__malloc(sizeof(double) * (count + 1))};
    double *matrix = dw__malloc(sizeof(double) * N * N),
           *damped = dw__malloc(sizeof(double) * N * N);
    dw_status status = DW_OK;
    if (!f.jacobian || !f.residuals || !matrix || !damped) {
        status = dw__fail_memory("the normal equations", sizeof(double) * count * N);
        goto cleanup;
    }
    double vector[N], step[N], damping = 1e-3, cost = cost_of(&f, constants);
    for (int turn = 0; turn < MOST_STEPS; turn++) {
        linearize(&f, constants);
        normal_equations(&f, constants, matrix, vector);
        double better = cost;
        for (int attempt = 0; attempt < 8; attempt++) {
            memcpy(damped, matrix, sizeof(double) * N * N);
            memcpy(step, vector, sizeof vector);
            for (int k = 0; k < N; k++) damped[k * N + k] *= 1 + damping;
            dw__constants trial = *constants;
            if (solve(damped, step, N)) {
                for (int k = 0; k < N; k++)
                    ((double *)&trial)[k] *= exp(fmax(-0.5, fmin(0.5, step[k])));
                better = cost_of(&f, &trial);
            }
            if (better < cost) {
                *constants = trial;
                damping *= 0.3;
                break;
            }
            damping *= 5;
        }
        if (!(better < cost * (1 - 1e-5))) break;
        cost = better;
    }
cleanup:
    dw__free(f.jacobian);
    dw__free(f.residuals);
    dw__free(matrix);
    dw__free(damped);
    return status;
}
