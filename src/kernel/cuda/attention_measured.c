/* Attention as it was measured. Written by bench/attention_rates.py; not to be edited.
 *
 * NVIDIA H200, 2026-11-21, torch 2.11.0+cu130, cuDNN 91900: medians of 11 rounds of
 * bench/hopper_attention.py, BF16, 16384 rows of queries in all. TFLOP/s of 4 B H S^2 D operations forward (half of
 * them when causal), 2.5 times as many backward. Machines differ by several per cent from day to day: these figures
 * order candidates and scale by shape; which is faster here is for measuring to say. */
#include "kernel/cuda/attention_candidates.h"

/* clang-format off */
const char dw__attention_rates_source[] = "NVIDIA H200, torch 2.11.0+cu130, 2026-11-21: nearest shape";

const dw__attention_rate dw__attention_rates[] = {
    /* head_dim, rows, causal, then forward and backward of deepwell, cudnn, flash */
    {64, 512, false, {{389, 299}, {380, 285}, {265, 170}}},
    {64, 512, true, {{229, 180}, {254, 171}, {153, 107}}},
    {64, 1024, false, {{438, 394}, {428, 369}, {287, 215}}},
    {64, 1024, true, {{307, 271}, {334, 253}, {216, 155}}},
    {64, 2048, false, {{506, 470}, {457, 428}, {297, 248}}},
    {64, 2048, true, {{384, 359}, {392, 328}, {262, 198}}},
    {64, 4096, false, {{525, 521}, {474, 461}, {304, 270}}},
    {64, 4096, true, {{448, 430}, {431, 387}, {280, 231}}},
    {64, 8192, false, {{548, 537}, {473, 470}, {299, 274}}},
    {64, 8192, true, {{496, 481}, {456, 427}, {292, 254}}},
    {64, 16384, false, {{541, 543}, {469, 471}, {295, 274}}},
    {64, 16384, true, {{515, 514}, {462, 453}, {293, 270}}},
    {128, 512, false, {{518, 335}, {513, 341}, {304, 179}}},
    {128, 512, true, {{323, 200}, {333, 214}, {185, 117}}},
    {128, 1024, false, {{600, 439}, {595, 445}, {332, 229}}},
    {128, 1024, true, {{437, 302}, {440, 317}, {250, 170}}},
    {128, 2048, false, {{670, 521}, {647, 521}, {348, 267}}},
    {128, 2048, true, {{525, 401}, {518, 413}, {280, 218}}},
    {128, 4096, false, {{699, 572}, {668, 564}, {356, 283}}},
    {128, 4096, true, {{594, 478}, {577, 483}, {304, 255}}},
    {128, 8192, false, {{709, 595}, {673, 582}, {344, 283}}},
    {128, 8192, true, {{628, 532}, {609, 531}, {308, 281}}},
    {128, 16384, false, {{699, 595}, {643, 588}, {322, 287}}},
    {128, 16384, true, {{651, 574}, {631, 579}, {320, 300}}},
    {256, 512, false, {{519, 204}, {519, 242}, {285, 162}}},
    {256, 512, true, {{321, 174}, {338, 180}, {208, 108}}},
    {256, 1024, false, {{632, 279}, {620, 303}, {307, 201}}},
    {256, 1024, true, {{440, 257}, {447, 256}, {246, 151}}},
    {256, 2048, false, {{688, 325}, {686, 369}, {318, 230}}},
    {256, 2048, true, {{541, 336}, {539, 323}, {272, 189}}},
    {256, 4096, false, {{712, 348}, {719, 405}, {327, 245}}},
    {256, 4096, true, {{620, 397}, {596, 374}, {284, 217}}},
    {256, 8192, false, {{727, 356}, {732, 377}, {320, 252}}},
    {256, 8192, true, {{668, 437}, {626, 419}, {293, 239}}},
    {256, 16384, false, {{720, 362}, {711, 372}, {299, 257}}},
    {256, 16384, true, {{692, 466}, {642, 403}, {285, 246}}},
};
/* clang-format on */
const size_t dw__attention_rate_count = DW_COUNT(dw__attention_rates);
