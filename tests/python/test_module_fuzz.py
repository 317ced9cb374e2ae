"""Random modules, their state and its changes: compares Deepwell with PyTorch (module_fuzz.py)."""

import module_fuzz
import pytest


def differences(seeds: range, monkeypatch) -> list[str]:
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")  # engines run even where they are slower
    found, by_engine = [], 0
    for seed in seeds:
        _, served, differences, kind = module_fuzz.check(seed, True, True)
        by_engine += served
        if differences and kind != module_fuzz.STATED:
            found += [f"seed {seed}: {line}" for line in differences[:3]]
    assert by_engine > len(seeds) // 3, "the engine ran too few of the modules"
    return found


def test_random_modules(monkeypatch) -> None:
    """Each module takes about a second, mostly for captures. Fewer modules would miss whole kinds
    of statements."""
    assert not differences(range(1000, 1016), monkeypatch)


@pytest.mark.slow
def test_more_random_modules(monkeypatch) -> None:
    assert not differences(range(2000, 2100), monkeypatch)


def test_a_tensor_overwritten_whole_keeps_its_zero_gradient(monkeypatch) -> None:
    """The graph has no edge to the old value, so PyTorch, which gives zeros to the operations that
    computed it, runs these modules."""
    seeds = (2000550, 2000677, 2000705, 2000907)
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    assert [module_fuzz.check(seed, True, True)[2] for seed in seeds] == [[]] * len(seeds)


def test_a_wrong_value_is_found() -> None:
    """Tests the comparison itself: it accepts one unit of rounding, and detects a factor of 1.001
    and a missing effect."""
    case = module_fuzz.make(3)
    plain = module_fuzz.follow(case, False)
    noisy = [module_fuzz.follow(case, False, seed) for seed in range(3)]
    assert not module_fuzz.differences(case, noisy[0], plain, noisy[1:])
    for what in ("output 0", "one.weight", "buffer held", "global TENSOR"):
        wrong = [[(w, v * 1.001 if w == what else v) for w, v in record] for record in plain]
        assert any(what in line for line in module_fuzz.differences(case, wrong, plain, noisy)), (
            what
        )
