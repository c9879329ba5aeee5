"""Arguments as flags, settings that engines share, and models without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import EngineInfo
from headway.engines.launcher import SETTINGS, Launcher, LaunchError, LaunchSpec, flags, weights


def spec(**changes: Any) -> LaunchSpec:
    fields: dict[str, Any] = {"instance": "a", "kind": "some", "model": {"name": "m", "path": "/m"}}
    fields |= {"dtype": "float32", "device": "cpu", "python": Path("python"), "log": Path("log")}
    return LaunchSpec(**(fields | changes))


def launcher(**equal: str) -> Launcher:
    return Launcher(None, lambda _: EngineInfo("", "", "", "", ""), equal=equal)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, []),
        ({"max_num_seqs": 8}, ["--max-num-seqs", "8"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"gpu_memory_utilization": 0.9}, ["--gpu-memory-utilization", "0.9"]),
        ({"sizes": [1, 2]}, ["--sizes", "1", "2"]),
        ({"compilation_config": {"level": 3}}, ["--compilation-config", '{"level": 3}']),
    ],
)
def test_arguments_as_flags(arguments, words):
    assert flags(arguments) == words


def test_a_flag_without_an_opposite_is_left_out_where_it_is_false():
    assert flags({"disable_radix_cache": False, "a": 1}, no="") == ["--a", "1"]


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]*", fullmatch=True), st.integers()))
def test_each_argument_is_a_flag_and_its_value(arguments):
    words = flags(arguments)
    pairs = zip(words[::2], words[1::2], strict=True)
    assert [(f"--{k.replace('_', '-')}", str(v)) for k, v in arguments.items()] == list(pairs)


def test_settings_to_share_have_the_names_of_the_kind_and_the_suites_own_come_last():
    made = launcher(max_num_seqs="rows", threads="t")
    equal = {"max_num_seqs": 8, "threads": 2}
    assert made.arguments(spec(equal=equal, args={"x": 1})) == {"rows": 8, "t": 2, "x": 1}
    assert made.arguments(spec(equal=equal, args={"rows": 9})) == {"rows": 9, "t": 2}


def test_a_setting_that_a_kind_does_not_have_is_no_equal_tuning():
    with pytest.raises(LaunchError, match="a is to be tuned equally, but some has no threads"):
        launcher(max_num_seqs="rows").arguments(spec(equal={"max_num_seqs": 8, "threads": 2}))


def test_every_launcher_names_settings_that_there_are():
    from headway.engines.servers import LAUNCHERS, launcher_of

    for kind in [*LAUNCHERS, "hf_naive"]:
        assert set(launcher_of(kind).equal) <= set(SETTINGS)


def test_weights_are_on_disk_or_there_are_none():
    assert weights(spec()) == "/m"
    with pytest.raises(LaunchError, match="and m has none"):
        weights(spec(model={"name": "m", "path": "/m", "synthetic": True}))


def test_a_key_is_not_shown():
    assert "secret" not in repr(spec(api_key="secret"))
