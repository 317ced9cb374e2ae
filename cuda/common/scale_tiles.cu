// Scales of blocks in the tiles that tensor cores read (scale_layout.h), and rows of codes that begin at multiples of 16
// bytes, both from plain contiguous rows: for codes of graph_quantize.cu, which rotates and rounds stochastically, where
// quantize.cu writes tiles itself. There, zeros are what its kernels expect before them.
//
// Bytes: one read of the scales, or codes, and one write.

#include "scale_tiles_params.h"
#include "strided.cuh"

extern "C" __global__ void scale_tiles(const __grid_constant__ dw_scale_tiles_params p) {
    const long long tile_words = DW_SCALE_TILE_BYTES / DW_SCALE_TILE_COLUMNS;
    EACH_ELEMENT(word, p.words) {
        const long long tile = word / tile_words;
        const int place = (int)(word % tile_words); // line * 4 + rows of 32
        const long long row = tile / p.wide * DW_SCALE_TILE_ROWS + place % 4 * 32 + place / 4,
                        column = tile % p.wide * DW_SCALE_TILE_COLUMNS;
        unsigned four = 0;
        if (row < p.rows) {
            const unsigned char *from = p.scales + row / p.repeat * p.columns + column;
            for (int i = 0; i < DW_SCALE_TILE_COLUMNS && column + i < p.columns; i++)
                four |= (unsigned)from[i] << 8 * i;
        }
        p.tiles[word] = four;
    }
}

extern "C" __global__ void padded_rows(const __grid_constant__ dw_padded_rows_params p) {
    EACH_ELEMENT(vector, p.vectors) {
        const long long across = p.padded / 16, row = vector / across, first = vector % across * 16;
        const unsigned char *from = p.from + row * p.row_bytes;
        unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (first + i < p.row_bytes) words[i / 4] |= (unsigned)from[first + i] << 8 * (i % 4);
        ((uint4 *)p.to)[vector] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void zeros(const __grid_constant__ dw_zeros_params p) {
    EACH_ELEMENT(vector, p.vectors) ((uint4 *)p.to)[vector] = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void scale_product(const __grid_constant__ dw_scale_product_params p) {
    p.factors[0] = *p.a * *p.b;
    p.factors[1] = 0.f;
}
