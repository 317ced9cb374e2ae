"""`deepwell probe`, as a user runs it."""

import json
import os

import program


def probe(*arguments):
    return program.run("probe", *arguments)


def test_cards_without_nvlink_have_no_domain():
    words = probe("--hardware", "rtx5090:4")
    assert "none joined by NVLink" in words.stdout and "1 joined" not in words.stdout


def test_this_machine_as_text_and_json():
    words = probe()
    assert words.returncode == 0, words.stderr
    assert "CPU" in words.stdout and f"{len(os.sched_getaffinity(0))} usable" in words.stdout
    described = json.loads(probe("--json").stdout)
    assert described["machine"]["cpu"]["usable"] == len(os.sched_getaffinity(0))
    assert len(described["machine"]["gpus"]) == described["gpus"] or described["gpus"] > 0
    if described["gpus"] == 0:
        assert described["machine"]["gpus"] == [] and "no GPU" in described["machine"]["remarks"][0]


def test_edited_description_is_accepted(tmp_path):
    file = tmp_path / "cluster.json"
    assert probe("--hardware", "h100:64", "-o", file).returncode == 0
    written = json.loads(file.read_text())
    assert written["gpus"] == 64 and written["rates"]["bf16"]["value"] == 989.4e12
    written["gpus"] = 128
    written["network_bandwidth"] = 25e9
    file.write_text(json.dumps(written))
    back = json.loads(probe("--hardware", file, "--json").stdout)
    assert back["gpus"] == 128
    assert back["network_bandwidth"] == {"value": 25e9, "kind": "given", "source": ""}
    assert back["memory"] == written["memory"]
    assert list(tmp_path.iterdir()) == [file]  # no other file remains
    words = probe("--hardware", file)
    assert "128; 8 in a node, 8 joined by NVLink" in words.stdout


def test_description_of_this_machine_is_valid(tmp_path):
    file = tmp_path / "here.json"
    assert probe("-o", file).returncode == 0
    read = probe("--hardware", file, "--json")
    assert read.returncode == 0, read.stderr
    here = json.loads(file.read_text())
    del here["machine"]
    assert json.loads(read.stdout) == here


def test_profiles_are_listed():
    names = probe("--hardware", "list").stdout.split()
    for name in "a100-40 a100-80 h100 h200 b200 b300 gb200 gb300 rtx5090".split():
        assert name in names


def test_invalid_requests(tmp_path):
    file = tmp_path / "h.json"
    file.write_text('{"profile": "h100", "memory": 80}')
    cases = [
        (["--fast"], 2, "probe: unknown argument '--fast'"),
        (["-o"], 2, "-o needs a value"),
        (["--hardware", "h100", "--measure"], 2, "does not go with --hardware"),
        (["--hardware", "h101"], 1, 'no hardware "h101" in the catalogue; it has v100'),
        (["--hardware", "h100:0"], 1, "COUNT from 1 to 1048576"),
        (["--hardware", "h100:10000000"], 1, "COUNT from 1 to 1048576"),
        (["--hardware", file], 1, f'"{file}": memory is 80; expected'),
        (["--hardware", tmp_path], 1, str(tmp_path)),
        (["-o", tmp_path / "none" / "f"], 1, "cannot write"),
    ]
    for arguments, status, part in cases:
        run = probe(*arguments)
        assert run.returncode == status, (arguments, run.stderr)
        assert part in run.stderr
        assert run.stdout == ""
