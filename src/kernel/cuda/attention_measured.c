/* Attention as it was measured. Written by bench/attention_rates.py; not to be edited.
 *
 * NVIDIA H200, 2026-11-22, torch 2.11.0+cu130, cuDNN 91900: medians of 11 rounds of
 * bench/hopper_attention.py, BF16, 16384 rows of queries in all. TFLOP/s of 4 B H S^2 D operations forward (half of
 * them when causal), 2.5 times as many backward. Machines differ by several per cent from day to day: these figures
 * order candidates and scale by shape; which is faster here is for measuring to say. */
#include "kernel/cuda/gpu_attention.h"

/* clang-format off */
const char dw__attention_rates_source[] = "NVIDIA H200, torch 2.11.0+cu130, 2026-11-22: nearest shape";

const dw__attention_rate dw__attention_rates[] = {
    /* head_dim, rows, causal, then forward and backward of deepwell, cudnn, flash */
    {64, 512, false, {{387, 329}, {382, 282}, {266, 170}}},
    {64, 512, true, {{229, 238}, {257, 170}, {153, 107}}},
    {64, 1024, false, {{439, 416}, {428, 369}, {287, 215}}},
    {64, 1024, true, {{307, 296}, {333, 252}, {214, 154}}},
    {64, 2048, false, {{514, 491}, {458, 430}, {298, 249}}},
    {64, 2048, true, {{383, 389}, {393, 329}, {263, 199}}},
    {64, 4096, false, {{531, 532}, {474, 458}, {303, 268}}},
    {64, 4096, true, {{447, 463}, {432, 384}, {283, 229}}},
    {64, 8192, false, {{562, 553}, {480, 470}, {304, 277}}},
    {64, 8192, true, {{492, 523}, {457, 426}, {294, 254}}},
    {64, 16384, false, {{555, 556}, {472, 473}, {298, 277}}},
    {64, 16384, true, {{509, 561}, {468, 455}, {298, 270}}},
    {128, 512, false, {{518, 348}, {517, 342}, {304, 180}}},
    {128, 512, true, {{327, 249}, {333, 214}, {185, 117}}},
    {128, 1024, false, {{612, 453}, {603, 448}, {333, 229}}},
    {128, 1024, true, {{446, 325}, {440, 318}, {246, 170}}},
    {128, 2048, false, {{672, 532}, {652, 525}, {348, 267}}},
    {128, 2048, true, {{550, 428}, {526, 414}, {287, 218}}},
    {128, 4096, false, {{702, 575}, {673, 569}, {354, 285}}},
    {128, 4096, true, {{622, 507}, {584, 486}, {307, 253}}},
    {128, 8192, false, {{709, 577}, {683, 574}, {355, 285}}},
    {128, 8192, true, {{663, 561}, {616, 534}, {319, 272}}},
    {128, 16384, false, {{710, 599}, {664, 594}, {331, 289}}},
    {128, 16384, true, {{689, 609}, {640, 578}, {322, 299}}},
    {256, 512, false, {{514, 298}, {520, 242}, {284, 162}}},
    {256, 512, true, {{320, 200}, {339, 180}, {208, 108}}},
    {256, 1024, false, {{636, 389}, {624, 303}, {307, 201}}},
    {256, 1024, true, {{436, 287}, {455, 256}, {250, 151}}},
    {256, 2048, false, {{699, 442}, {695, 367}, {318, 228}}},
    {256, 2048, true, {{527, 359}, {541, 323}, {271, 187}}},
    {256, 4096, false, {{729, 471}, {726, 404}, {325, 242}}},
    {256, 4096, true, {{618, 418}, {603, 376}, {285, 217}}},
    {256, 8192, false, {{741, 486}, {711, 377}, {302, 252}}},
    {256, 8192, true, {{665, 453}, {631, 420}, {291, 239}}},
    {256, 16384, false, {{742, 497}, {711, 373}, {299, 252}}},
    {256, 16384, true, {{691, 487}, {651, 412}, {281, 251}}},
};
/* clang-format on */
const size_t dw__attention_rate_count = DW_COUNT(dw__attention_rates);
