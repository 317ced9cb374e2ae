"""The dry run's report in a browser: the script has no errors, charts are drawn, figures agree with
the JSON, dark mode and hover work."""

import json
import os
import re

import browser
import deepwell as dw
import numpy as np
import pytest

OPTIONS = {"what_ifs": False}


def dense():
    return dw.autoplan(
        "llama3-70b",
        hw="h100:64",
        seq_len=4096,
        global_batch=128,
        constraints=["pp=8", "tp=4", "schedule=1f1b"],
        **OPTIONS,
    )


def large():
    return dw.autoplan("llama3-405b", hw="h100:16384", seq_len=8192, global_batch=2048, **OPTIONS)


def mixture():
    return dw.autoplan(
        "deepseek-v3",
        hw="gb200:2048",
        seq_len=4096,
        global_batch=8192,
        precision="mxfp8",
        constraints=["schedule=dualpipe"],
        **OPTIONS,
    )


def single():
    return dw.autoplan("llama3-8b", hw="h100:1", seq_len=4096, global_batch=8, **OPTIONS)


def too_large():
    plan = json.loads(dense().to_json())
    plan["layout"].update(micro_batch=8, recompute="none")
    return plan


PLANS = [dense, large, mixture, single, too_large]


@pytest.fixture(scope="module")
def page():
    found = browser.find()
    if isinstance(found, str):
        # Root installs one (scripts/bootstrap.sh); others may have none.
        (pytest.fail if os.geteuid() == 0 else pytest.skip)(f"no browser: {found}")
    yield found.page
    found.close()


@pytest.fixture(scope="module", params=PLANS, ids=lambda make: make.__name__)
def report(request, page, tmp_path_factory):
    """Returns the figures of the plan whose page is open."""
    file = tmp_path_factory.mktemp("report") / f"{request.param.__name__}.html"
    figures = dw.dryrun(request.param(), report=file)
    page.errors.clear()
    page.requests.clear()
    page.media(scheme="light")
    page.resize(1320, 1000)
    page.open(file)
    return figures


def numbers(text):
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))]


def milliseconds(text):
    unit = {"s": 1e3, "ms": 1, "µs": 1e-3}[text.split()[-1]]
    return numbers(text)[0] * unit


def rows(page, table):
    return page.evaluate(
        f"[...document.querySelectorAll('#{table} tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )


def luminance(colour):
    parts = [c / 255 for c in colour]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def colour(page, expression):
    return numbers(page.evaluate(expression))[:3]


def test_page_loads_no_other_resource(page, report):
    assert page.errors == []
    assert len(page.requests) == 1 and page.requests[0].startswith("file://")
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("document.querySelectorAll('canvas, svg').length") == 3


def test_headline_agrees_with_the_json(page, report):
    cards = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.cards div')].map("
        "d => [d.dataset.figure, [d.querySelector('b').textContent, d.querySelector('span').textContent]]))"
    )
    step = milliseconds(cards["step_time_ms"][0])
    assert step == pytest.approx(report["step_time_ms"], rel=0.006)
    rate = numbers(cards["tokens_per_second_per_gpu"][0])[0]
    assert rate == pytest.approx(report["tokens_per_second_per_gpu"], abs=0.5 + 1e-5 * rate)
    assert numbers(cards["mfu"][0])[0] == pytest.approx(100 * report["mfu"], abs=0.51)
    assert cards["fits"][0] == ("Fits" if report["fits"] else "Does not fit")
    assert numbers(cards["fits"][1])[:2] == pytest.approx(
        [report["memory_gb"], report["capacity_gb"]], abs=0.051
    )
    assert ("bubble_fraction" in cards) == (report["layout"]["pp"] > 1)
    if "bubble_fraction" in cards:
        bubble = numbers(cards["bubble_fraction"][0])[0]
        assert bubble == pytest.approx(100 * report["bubble_fraction"], abs=0.51)
    if report["layout"]["gpus"] > 1:
        assert numbers(cards["overlap"][0])[0] == pytest.approx(100 * report["overlap"], abs=0.51)
    speedups = {"expected_speedup"}
    if report["layout"]["precision"] != "bf16":
        speedups.add("speedup_over_bf16")
    for name in speedups:
        expected = report[name]
        if expected:
            assert numbers(cards[name][0])[0] == pytest.approx(expected, abs=0.0051)
        else:
            assert cards[name][0] == "–" and report[name + "_reason"] in cards[name][1]


def test_page_describes_the_plan(page, report):
    words = page.evaluate("byId('words').textContent")
    layout = report["layout"]
    said = numbers(words)
    for value in (layout["gpus"], layout["global_batch"], layout["seq_len"]):
        assert value in said
    for size, name in (
        ("tp", "tensor"),
        ("cp", "context"),
        ("pp", "pipeline"),
        ("ep", "experts are"),
    ):
        assert (name in words) == (layout[size] > 1)
    assert report["gpu"] in words and f"ZeRO {layout['zero_stage']}" in words


def test_page_states_the_prediction(page, report):
    assert page.evaluate("byId('basis').innerText") == "Predicted, not measured"
    text = page.evaluate("document.body.innerText")
    if report["capability"] >= 100:
        assert "nothing here was measured by Deepwell on Blackwell" in text
    text = re.sub("not measured|nothing here was measured by Deepwell on Blackwell", "", text)
    kinds = {figure["kind"] for figure in report["hardware"].values()}
    assert kinds <= {"published", "estimated", "read"}
    sources = " ".join(figure["source"] for figure in report["hardware"].values())
    assert text.count("measured") == sources.count("measured")


def test_parts_of_time_and_memory_add_up(page, report):
    time = sum(milliseconds(row[1]) for row in rows(page, "parts"))
    assert time == pytest.approx(report["step_time_ms"], rel=0.01)
    memory = sum(numbers(row[1])[0] for row in rows(page, "bytes"))
    assert memory == pytest.approx(max(report["capacity_gb"], report["memory_gb"]), abs=0.4)
    host = re.search(
        r"host's memory: ([\d.]+) GB", page.evaluate("byId('bytes-words').textContent")
    )
    assert bool(host) == (report["host_memory_gb"] > 0)
    assert not host or float(host[1]) == pytest.approx(report["host_memory_gb"], abs=0.051)
    stages = rows(page, "stages")
    assert len(stages) == len(report["stages"])
    for row, stage in zip(stages, report["stages"]):
        assert numbers(row[7])[0] == pytest.approx(stage["memory_gb"], abs=0.051)
    for stack in ("time-stack", "bytes-stack"):
        parts = page.evaluate(
            f"[...byId('{stack}').children].map(e => e.getBoundingClientRect().width)"
        )
        assert len(parts) >= 3 and sum(parts) <= page.evaluate(f"byId('{stack}').clientWidth") + 1


def test_events_have_the_right_place(page, report):
    """Checks pixels of the timeline in the middle of events that are wide enough: each has the colour of its kind."""
    page.evaluate("document.querySelector('[data-view=begin]').click()")
    found = page.evaluate("""(() => {
      const g = timeline.getContext("2d"), scale = scaleX(timeline.clientWidth), dpr = devicePixelRatio;
      const seen = [];
      data.lanes.forEach((lane, at) => {
        const rank = Math.floor(at / streams), s = at % streams;
        for (let i = 0; i < lane.length && lane[i] + lane[i + 1] < to && seen.length < 4000; i += 5) {
          if (lane[i + 1] * scale < 5) continue;
          const x = left + (lane[i] + 0.4 * lane[i + 1]) * scale, y = laneTop(rank, s) + (s ? thin / 2 : big / 8);
          const p = g.getImageData(Math.floor(x * dpr), Math.floor(y * dpr), 1, 1).data;
          seen.push([lane[i + 2], "#" + [p[0], p[1], p[2]].map(v => v.toString(16).padStart(2, "0")).join("")]);
        }
      });
      return [seen, kindColors.map(name => paint[name])];
    })()""")
    seen, colours = found
    assert len(seen) > 10
    wrong = [(kind, pixel) for kind, pixel in seen if pixel != colours[kind]]
    assert not wrong, (len(wrong), len(seen), wrong[:5])
    page.evaluate("document.querySelector('[data-view=all]').click()")


def test_the_roofline_has_every_kernel(page, report):
    points = page.evaluate(
        "[...document.querySelectorAll('#roofline .point')].map(e => [+e.dataset.x, +e.dataset.y])"
    )
    kernels = report["operations"]
    expected = [[k["operations"] / k["bytes"], k["operations"] / k["seconds"]] for k in kernels]
    assert np.allclose(sorted(points), sorted(expected), rtol=1e-9)
    hardware = report["hardware"]
    bandwidth = hardware["memory_bandwidth"]["value"]
    for kernel, (x, y) in zip(kernels, expected):
        peak = hardware["rate_" + kernel["rate"]]["value"]
        assert y <= min(peak, bandwidth * x) * 1.0001
    names = page.evaluate("""[...document.querySelectorAll('#roofline text.name')].map(e => {
      const b = e.getBBox(); return [e.textContent, b.x, b.y, b.x + b.width, b.y + b.height]; })""")
    assert {"attention", "MLP down", "head", "elementwise work"} <= {n[0] for n in names} or report[
        "model"
    ]["experts"]
    assert sum("TFLOP/s" in n[0] for n in names) == len({k["rate"] for k in kernels} | {"bf16"})
    for i, (name, x0, y0, x1, y1) in enumerate(names):
        assert 0 <= x0 and x1 <= 1200 and 0 <= y0 and y1 <= 520, name
        for other, a0, b0, a1, b1 in names[:i]:
            across, down = min(x1, a1) - max(x0, a0), min(y1, b1) - max(y0, b0)
            assert across <= 2 or down <= 4, (name, other)
    assert len(rows(page, "kernels")) == len(kernels)


def test_hovering_describes_the_event(page, report):
    x, y, width, height = page.box("#timeline")
    at = page.evaluate("""(() => {
      const lane = data.lanes[0], scale = scaleX(timeline.clientWidth);
      let best = 0;
      for (let i = 0; i < lane.length; i += 5) if (lane[i + 1] > lane[best + 1]) best = i;
      return [left + (lane[best] + lane[best + 1] / 2) * scale, data.kinds[lane[best + 2]]];
    })()""")
    page.mouse("mouseMoved", x + at[0], y + 3)
    page.wait("tip.style.display === 'block'")
    assert at[1] in page.evaluate("tip.textContent")
    x, y, width, height = page.box("#memory")
    page.mouse("mouseMoved", x + width / 2, y + 20)
    page.wait("/GB/.test(tip.textContent)")
    gigabytes = numbers(page.evaluate("tip.textContent.replace(/stage \\d+/, '')"))[0]
    assert 0 < gigabytes <= report["memory_gb"] + 0.01
    page.box("#roofline")
    spot = page.evaluate(
        "(r => [r.left + r.width / 2, r.top + r.height / 2])"
        "([...document.querySelectorAll('#roofline .point')].pop().getBoundingClientRect())"
    )
    page.mouse("mouseMoved", *spot)
    page.wait("/TFLOP/.test(tip.textContent) && tip.style.display === 'block'")
    page.mouse("mouseMoved", 1, 1)
    page.wait("tip.style.display === 'none'")


def test_zooming_by_wheel_button_and_key(page, report):
    x, y, width, height = page.box("#timeline")
    page.mouse("mouseWheel", x + width / 2, y + 5, deltaX=0, deltaY=-300)
    page.wait("to - from < 0.8 * end")
    page.evaluate("document.querySelector('[data-view=begin]').click()")
    assert page.evaluate("from === 0 && to < end")
    before = page.evaluate("to - from")
    page.evaluate("timeline.focus()")
    page.key("+")
    page.wait(f"to - from < {before}")
    page.key("0")
    page.wait("from === 0 && to === end")
    assert page.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page, report, scheme):
    page.media(scheme=scheme)
    page.wait(f"document.documentElement.dataset.theme === '{scheme}'")
    ground = colour(page, "getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) < 0.1) == (scheme == "dark")
    card = colour(page, "getComputedStyle(document.querySelector('section')).backgroundColor")
    for selector in ("body", "p.soft", ".cards span", ".good, .bad", "th"):
        ink = colour(page, f"getComputedStyle(document.querySelector('{selector}')).color")
        assert contrast(ink, card) >= 4.5, selector
    # Checks what a person sees: no chart is blank, and each contains its background colour.
    for selector, marks in (("#timeline", 0.15), ("#memory", 0.01), ("#roofline", 0.005)):
        pixels = page.screenshot(selector).reshape(-1, 3).astype(int)
        colours, counts = np.unique(pixels @ [65536, 256, 1], return_counts=True)
        assert len(colours) > 10, selector
        common = colours[np.argmax(counts)]
        ground = np.array([common >> 16, common >> 8 & 255, common & 255])
        apart = np.abs(pixels - ground).max(axis=1) > 40
        assert apart.mean() > marks, (selector, apart.mean())
    page.evaluate("byId('theme').click()")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    page.evaluate("byId('theme').click()")


def test_small_windows_and_paper(page, report):
    page.resize(400, 800)
    page.wait("innerWidth === 400 && timeline.width <= 400 * devicePixelRatio")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.resize(1320, 1000)
    page.wait("innerWidth >= 1300")
    page.media(kind="print")
    page.wait("matchMedia('print').matches")
    assert page.evaluate("getComputedStyle(document.querySelector('button')).display") == "none"
    page.media()


def test_accessibility_texts(page, report):
    unnamed = page.evaluate(
        "[...document.querySelectorAll('[role=img], canvas, svg')].filter(e => !e.getAttribute('aria-label')).length"
    )
    assert unnamed == 0
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
    assert page.evaluate("[...document.querySelectorAll('canvas')].every(c => c.tabIndex === 0)")
