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
    {64, 512, false, {{390, 344}, {383, 282}, {267, 171}}},
    {64, 512, true, {{229, 238}, {257, 170}, {154, 107}}},
    {64, 1024, false, {{439, 419}, {430, 370}, {288, 215}}},
    {64, 1024, true, {{304, 295}, {335, 251}, {217, 154}}},
    {64, 2048, false, {{510, 492}, {459, 429}, {298, 248}}},
    {64, 2048, true, {{385, 395}, {394, 329}, {263, 198}}},
    {64, 4096, false, {{527, 535}, {475, 454}, {304, 266}}},
    {64, 4096, true, {{450, 470}, {432, 384}, {281, 230}}},
    {64, 8192, false, {{547, 544}, {481, 459}, {300, 271}}},
    {64, 8192, true, {{494, 519}, {455, 420}, {292, 250}}},
    {64, 16384, false, {{545, 557}, {473, 471}, {298, 274}}},
    {64, 16384, true, {{508, 555}, {462, 450}, {292, 268}}},
    {128, 512, false, {{521, 354}, {516, 343}, {305, 180}}},
    {128, 512, true, {{319, 249}, {329, 213}, {184, 117}}},
    {128, 1024, false, {{606, 462}, {601, 449}, {334, 229}}},
    {128, 1024, true, {{438, 332}, {441, 318}, {250, 169}}},
    {128, 2048, false, {{673, 543}, {650, 525}, {348, 267}}},
    {128, 2048, true, {{536, 437}, {526, 413}, {285, 216}}},
    {128, 4096, false, {{703, 594}, {672, 570}, {353, 287}}},
    {128, 4096, true, {{607, 519}, {584, 486}, {309, 253}}},
    {128, 8192, false, {{713, 599}, {677, 579}, {342, 284}}},
    {128, 8192, true, {{642, 576}, {615, 536}, {315, 279}}},
    {128, 16384, false, {{708, 606}, {652, 590}, {325, 288}}},
    {128, 16384, true, {{665, 599}, {638, 556}, {324, 290}}},
    {256, 512, false, {{524, 299}, {521, 243}, {285, 163}}},
    {256, 512, true, {{322, 202}, {340, 180}, {211, 109}}},
    {256, 1024, false, {{636, 391}, {624, 301}, {307, 201}}},
    {256, 1024, true, {{443, 291}, {453, 258}, {248, 151}}},
    {256, 2048, false, {{692, 446}, {691, 368}, {319, 229}}},
    {256, 2048, true, {{545, 369}, {543, 324}, {272, 189}}},
    {256, 4096, false, {{715, 475}, {724, 401}, {325, 243}}},
    {256, 4096, true, {{626, 428}, {602, 377}, {287, 217}}},
    {256, 8192, false, {{723, 489}, {715, 375}, {303, 250}}},
    {256, 8192, true, {{672, 459}, {630, 417}, {287, 236}}},
    {256, 16384, false, {{726, 496}, {713, 369}, {299, 250}}},
    {256, 16384, true, {{700, 492}, {653, 404}, {290, 246}}},
};
/* clang-format on */
const size_t dw__attention_rate_count = DW_COUNT(dw__attention_rates);
