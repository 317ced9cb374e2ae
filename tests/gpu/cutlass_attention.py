"""CUTLASS's attention kernels behind dw_attention_forward, by name, first uses compared: the checks of cutlass_smoke.py.

python3 tests/gpu/cutlass_attention.py --lib build/release/lib/libdeepwell.so
    --cutlass build/release/lib/libdeepwell_cutlass.so
    [--refused WORDS]   instead: every kernel is refused at its first use, in these words
"""

from __future__ import annotations

import argparse
import ctypes
import sys

import cutlass_smoke as smoke
import native

# batch, heads, key-value heads, queries, keys, head dimension, causal; in addition to those of
# cutlass_smoke.py
_ATTENTIONS = [
    (3, 6, 1, 97, 515, 64, 0),
    (1, 3, 3, 129, 129, 64, 1),
    (2, 4, 4, 1, 1, 128, 1),
    (1, 5, 5, 513, 129, 128, 0),
]
_BF16 = 3  # dw_dtype


class Calls(smoke.Provider):
    """Launches through Deepwell's functions instead of the provider's."""

    def __init__(self, library: str, cutlass: str) -> None:
        super().__init__(cutlass)
        self.deepwell = native.Library(library)

    def launch(self, runtime: smoke.Runtime, kernel: smoke.Kernel, call: smoke.Attention) -> None:
        q_strides = call.q_batch_stride, call.head_dim, call.q_stride
        kv_strides = call.kv_batch_stride, call.head_dim, call.kv_stride
        o_strides = call.o_batch_stride, call.head_dim, call.o_stride
        named = native.Call(
            struct_size=ctypes.sizeof(native.Call),
            dtype=_BF16,
            batch=call.batch,
            heads_q=call.heads,
            heads_kv=call.heads_kv,
            seq_len_q=call.queries,
            seq_len_kv=call.keys,
            head_dim=call.head_dim,
            scale=call.scale,
            window_left=-1,
            window_right=0 if call.causal else -1,
            q=native.Tensor(call.q, *q_strides),
            k=native.Tensor(call.k, *kv_strides),
            v=native.Tensor(call.v, *kv_strides),
            o=native.Tensor(call.o, *o_strides),
            lse=call.lse,
            kernel=kernel.name,
        )
        said = self.deepwell.supported(named, False) or self.deepwell.forward(named)
        if said:
            raise SystemExit(said)
        runtime.check(runtime.library.cudaDeviceSynchronize())

    def check_refused(self, runtime: smoke.Runtime, kernel: smoke.Kernel, words: str) -> bool:
        try:
            smoke.run_attention(self, runtime, kernel, _ATTENTIONS[1], seed=0)
        except SystemExit as said:
            good = words in str(said)
            print(kernel.name.decode(), "refused" if good else f"says: {said}")
            return good
        print(kernel.name.decode(), "NOT refused")
        return False

    def check_refusals(self, kernel: smoke.Kernel) -> bool:
        """Checks that unsupported calls are rejected with the kernel's own message, with the same
        result without launching."""
        tensor, wide = native.Tensor(1 << 40, 0, 64, 64), native.Tensor(1 << 40, 0, 96, 96)
        fine = dict(batch=1, heads_q=1, heads_kv=1, seq_len_q=9, seq_len_kv=9, head_dim=64)
        fine |= dict(scale=0.5, window_left=-1, window_right=0)
        fine |= dict(q=tensor, k=tensor, v=tensor, o=tensor)
        wrong = [
            (dict(zip("qkvo", 4 * [wide])) | {"head_dim": 96}, "head dimension 96: 64 or 128"),
            ({"seq_len_kv": 10}, "causal attention of 9 queries to 10 keys"),
            ({"scale": 0.0}, "scale 0"),
            ({"window_left": 3}, "does not support a window"),
            ({"kernel": b"cutlass.none"}, "expected one of sm90_attention_forward, "),
        ]
        told = 0
        for change, words in wrong:
            members = {"dtype": _BF16, "kernel": kernel.name, **fine, **change}
            call = native.Call(struct_size=ctypes.sizeof(native.Call), **members)
            forward, supported = self.deepwell.forward(call), self.deepwell.supported(call, False)
            told += words in forward and forward == supported
            if words not in forward or forward != supported:
                print(f"expected {words!r}: {forward!r}, {supported!r}")
        print(f"refused: {told} of {len(wrong)}")
        return told == len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lib", required=True)
    parser.add_argument("--cutlass", required=True)
    parser.add_argument("--refused", help="these words are said of every kernel instead")
    options = parser.parse_args()
    runtime, calls = smoke.Runtime(), Calls(options.lib, options.cutlass)
    good = True
    for kernel in calls.kernels:
        if kernel.kind != smoke._ATTENTION or kernel.capability != runtime.capability():
            continue
        if options.refused:
            good &= calls.check_refused(runtime, kernel, options.refused)
            continue
        for seed, case in enumerate(smoke._ATTENTIONS + _ATTENTIONS):
            share = smoke.run_attention(calls, runtime, kernel, case, seed)
            runtime.release()
            good &= share <= 1
            words = " ".join(str(part) for part in case)
            print(f"{kernel.name.decode():32} {words:44} {share:.3f}", flush=True)
        good &= calls.check_refusals(kernel)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
