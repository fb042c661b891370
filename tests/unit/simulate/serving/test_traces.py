"""Workload files: every known trace is read, everything else is refused in one line."""

from __future__ import annotations

import json

import pytest

from tutti.errors import InputError
from tutti.simulate.serving.traces import load_workload, read_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 3]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1317,Conversation log\n"
)


def _write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_known_traces_are_read(tmp_path):
    lines = "\n".join(map(json.dumps, MOONCAKE))
    mooncake = read_trace(_write(tmp_path, "m.jsonl", lines))
    assert mooncake.times.tolist() == [0.0, 1.5]
    first, second = mooncake.tokens(0), mooncake.tokens(1)
    assert len(first) == 1030
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    azure = read_trace(_write(tmp_path, "a.csv", AZURE))
    assert azure.times[1] == pytest.approx(4.314579)
    assert azure.prompts.tolist() == [374, 396]
    burst = read_trace(_write(tmp_path, "b.csv", BURST))
    assert burst.times.tolist() == [0.0, 40.0]
    assert burst.outputs.tolist() == [18, 1]
    talk = [{"conversations": [{"from": "human", "value": "x" * 400}, {"value": "y" * 80}]}]
    shared = load_workload(_write(tmp_path, "s.json", json.dumps(talk)))
    assert shared.trace is not None
    assert (shared.trace.prompts.tolist(), shared.trace.outputs.tolist()) == ([100], [20])
    own = load_workload(_write(tmp_path, "o.csv", "time_s,prompt,output\n0,10,5\n2,20,7\n"))
    assert own.service.traffic.requests_per_s == pytest.approx(0.5)
    assert own.service.traffic.prompt.mean == 15


def test_a_description_is_read(tmp_path):
    text = (
        "traffic:\n  prompt: {mean: 161, sigma: 1.0, longest: 1024}\n"
        "  output: {mean: 338, longest: 512}\n  requests_per_s: 4\n"
        "limits: {first_token_s: 1, per_token_s: 0.05}\n"
    )
    workload = load_workload(_write(tmp_path, "w.yaml", text))
    assert workload.trace is None
    assert len(workload.requests(12)) == 12
    assert workload.service.limits.per_token_s == 0.05


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.csv", "a,b\n1,2\n", "lacks the column 'time_s'"),
        ("x.csv", "time_s,prompt\n1,2\n", "lacks the column 'output' of a trace of tutti"),
        ("x.csv", "time_s,prompt,output\n", "has no requests"),
        ("x.csv", "time_s,prompt,output\n2,5,5\n1,5,5\n", "request 2: arrives before"),
        ("x.csv", "time_s,prompt,output\n-1,5,5\n", "'time_s' is -1"),
        ("x.csv", "time_s,prompt,output\n0,many,5\n", "'prompt' is 'many'"),
        ("x.csv", "time_s,prompt,output\n0,-4,5\n", "'prompt' is -4 tokens"),
        ("x.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "expected seconds or a"),
        ("x.jsonl", "{", "line 1: is no JSON"),
        ("x.jsonl", "[1]", "expected an object per line"),
        ("x.json", "[]", "no conversation"),
        ("x.yaml", "traffic: {prompt: {mean: 5, longest: 9}}", "'output' is missing"),
        ("x.yaml", "trafic: 1", "unknown key 'trafic'"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, text, said):
    with pytest.raises(InputError) as refused:
        load_workload(_write(tmp_path, name, text))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
