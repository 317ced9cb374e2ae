/* Fits the planner's constants: robust least squares of the logarithm of time (Levenberg-Marquardt) over the logarithms
 * of the constants. A prior keeps each constant near its published value. */
#include "calibrate.h"
#include <math.h>
#include <string.h>

enum { MOST_STEPS = 25 };
/* standard deviation of one run's logarithm; sets the priors' relative weight */
static const double row_spread = 0.12;
/* Huber's threshold: larger residuals count linearly. */
static const double robust_at = 0.15;
static const double derivative_step = 1e-3;

typedef struct fit {
    const lab_runs *runs;
    const uint32_t *rows;
    const double *weights;
    size_t count;
    double *jacobian, *residuals; /* count x constants; count */
} fit;

static double residual(const lab_run *run, const lab_constants *constants) {
    dw_prediction prediction;
    dw_predict_with(constants->value, &run->model, run->hardware, &run->layout, &prediction);
    return log(prediction.tokens_per_second / run->tokens_per_second);
}

/* Huber's loss of a residual. */
static double robust_cost(double value) {
    double size = fabs(value);
    return size <= robust_at ? 0.5 * size * size : robust_at * (size - 0.5 * robust_at);
}

static double cost_of(const fit *f, const lab_constants *constants) {
    double cost = 0;
    for (size_t at = 0; at < f->count; at++)
        cost += f->weights[at] * robust_cost(residual(&f->runs->rows[f->rows[at]], constants)) /
                (row_spread * row_spread);
    const dw_planner_constant *table;
    const int width = dw_planner_constants(&table);
    for (int k = 0; k < width; k++) {
        double off = log(constants->value[k] / table[k].prior) / table[k].spread;
        cost += 0.5 * off * off;
    }
    return cost;
}

/* Solves by Cholesky decomposition and overwrites `matrix`. Returns false if it is not positive definite. */
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

static void linearize(const fit *f, const lab_constants *at) {
    const dw_planner_constant *table;
    const int width = dw_planner_constants(&table);
    for (size_t row = 0; row < f->count; row++) {
        const lab_run *run = &f->runs->rows[f->rows[row]];
        f->residuals[row] = residual(run, at);
        for (int k = 0; k < width; k++) {
            lab_constants moved = *at;
            moved.value[k] *= exp(derivative_step);
            f->jacobian[row * (size_t)width + (size_t)k] =
                (residual(run, &moved) - f->residuals[row]) / derivative_step;
        }
    }
}

static void normal_equations(const fit *f, const lab_constants *at, double *matrix,
                             double *vector) {
    const dw_planner_constant *table;
    const int width = dw_planner_constants(&table);
    memset(matrix, 0, sizeof *matrix * (size_t)width * (size_t)width);
    memset(vector, 0, sizeof *vector * width);
    for (size_t row = 0; row < f->count; row++) {
        double size = fabs(f->residuals[row]);
        double weight =
            f->weights[row] / (row_spread * row_spread) * (size > robust_at ? robust_at / size : 1);
        const double *slope = f->jacobian + row * (size_t)width;
        for (int i = 0; i < width; i++) {
            vector[i] -= weight * slope[i] * f->residuals[row];
            for (int j = 0; j <= i; j++) matrix[i * width + j] += weight * slope[i] * slope[j];
        }
    }
    for (int k = 0; k < width; k++) {
        const dw_planner_constant *row = &table[k];
        double stiff = 1 / (row->spread * row->spread);
        matrix[k * width + k] += stiff;
        vector[k] -= stiff * log(at->value[k] / row->prior);
    }
}

dw_status lab_fit_constants(const lab_runs *runs, const uint32_t *rows, const double *weights,
                            size_t count, lab_constants *constants) {
    const dw_planner_constant *table;
    const int width = dw_planner_constants(&table);
    fit f = {runs,
             rows,
             weights,
             count,
             lab_malloc(sizeof(double) * (count + 1) * (size_t)width),
             lab_malloc(sizeof(double) * (count + 1))};
    double *matrix = lab_malloc(sizeof(double) * (size_t)width * (size_t)width),
           *damped = lab_malloc(sizeof(double) * (size_t)width * (size_t)width);
    dw_status status = DW_OK;
    if (!f.jacobian || !f.residuals || !matrix || !damped) {
        status = lab_fail_memory("the normal equations", sizeof(double) * count * (size_t)width);
        goto cleanup;
    }
    double vector[LAB_CONSTANTS_MOST] = {0}, step[LAB_CONSTANTS_MOST], damping = 1e-3,
           cost = cost_of(&f, constants);
    for (int turn = 0; turn < MOST_STEPS; turn++) {
        linearize(&f, constants);
        normal_equations(&f, constants, matrix, vector);
        double better = cost;
        for (int attempt = 0; attempt < 8; attempt++) {
            memcpy(damped, matrix, sizeof(double) * (size_t)width * (size_t)width);
            memcpy(step, vector, sizeof vector);
            for (int k = 0; k < width; k++) damped[k * width + k] *= 1 + damping;
            lab_constants trial = *constants;
            if (solve(damped, step, width)) {
                for (int k = 0; k < width; k++)
                    trial.value[k] *= exp(fmax(-0.5, fmin(0.5, step[k])));
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
    lab_free(f.jacobian);
    lab_free(f.residuals);
    lab_free(matrix);
    lab_free(damped);
    return status;
}
