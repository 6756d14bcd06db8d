"""Profiles as files: strict reading, atomic merging, found by the devices that they are of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import UsageError
from automesh.hardware.calibration.points import CollectiveProbe, KernelProbe
from automesh.hardware.calibration.profile import Profile
from automesh.hardware.calibration.profile_files import (
    NoProfile,
    check_place,
    find_profile,
    host_of,
    merge_profile,
    profile_folder,
    profile_path,
    read_profile,
)
from tests.hardware.calibration.test_profile import PROBES, point, profile_of

FULL = profile_of([point(one, 1e-6 * (1 + place)) for place, one in enumerate(PROBES)])


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "p.json"
    merge_profile(path, FULL)
    assert read_profile(path) == FULL
    assert sorted(one.name for one in path.parent.iterdir() if one.suffix == ".json") == ["p.json"]
    # What does not take part in comparing comes back too.
    links = [one.probe.link_s for one in FULL.points if isinstance(one.probe, CollectiveProbe)]
    again = read_profile(path).points
    assert [one.probe.link_s for one in again if isinstance(one.probe, CollectiveProbe)] == links


def test_merging_into_a_file_keeps_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    merge_profile(path, profile_of([point(PROBES[5], 1e-3)]))
    merged = merge_profile(path, profile_of([point(KernelProbe(), 2e-6)]))
    assert read_profile(path) == merged
    assert {one.probe for one in merged.points} == {PROBES[5], KernelProbe()}
    with pytest.raises(UsageError, match="4 x cpu on a host"):
        merge_profile(path, profile_of([], num_devices=4))
    assert read_profile(path) == merged


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    tree = json.loads(json.dumps(_plain(FULL)))
    change(tree)
    return json.dumps(tree)


def _plain(profile: Profile) -> Any:
    return asdict(profile)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold an object"),
        (broken(lambda tree: tree.pop("host")), "`host` is missing"),
        (broken(lambda tree: tree.update(hots="x")), "`hots` is not a known key"),
        (broken(lambda tree: tree.update(schema=2)), "schema 2 is not 1"),
        (broken(lambda tree: tree.update(num_devices="8")), "`num_devices` must be an integer"),
        (broken(lambda tree: tree.update(kernel_s=-1.0)), "a time of -1.0 s is impossible"),
        (broken(lambda tree: tree.update(kernel_s=float("nan"))), "is impossible"),
        (broken(lambda tree: tree["matmuls"][0].update(flop_s=-1e-9)), "is impossible"),
        (broken(lambda tree: tree["points"][0].pop("made")), "`points[0].made` is missing"),
        (
            broken(lambda tree: tree["collectives"][0].update(collective=3)),
            "`collectives[0].collective` must be a string",
        ),
    ],
)
def test_a_broken_profile_is_refused_in_words(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    assert says in caught.value.message
    assert f"`{path}`" in caught.value.message
    assert "automesh calibrate" in caught.value.hint
    with pytest.raises(UsageError):
        merge_profile(path, FULL)
    assert path.read_text() == text


def test_profiles_are_found_by_their_devices(tmp_path: Path) -> None:
    environ = {"AUTOMESH_PROFILES": str(tmp_path)}
    tpu = profile_of([], platform="tpu", device_kind="TPU v5 lite", host="", num_devices=4)
    for one in (FULL, tpu):
        path = profile_path(
            tmp_path,
            platform=one.platform,
            device_kind=one.device_kind,
            num_devices=one.num_devices,
            host=one.host,
        )
        merge_profile(path, one)
    assert (tmp_path / "tpu-tpu-v5-lite.json").exists()
    assert find_profile("tpu", "TPU v5 lite", 256, environ=environ) == tpu
    assert find_profile("cpu", "cpu", 8, environ=environ, host="a host") == FULL
    for count, host in ((4, "a host"), (8, "another"), (8, None)):
        missing = find_profile("cpu", "cpu", count, environ=environ, host=host)
        assert isinstance(missing, NoProfile)
        assert "there is no profile" in missing.reason


def test_a_file_of_other_devices_is_not_taken(tmp_path: Path) -> None:
    environ = {"AUTOMESH_PROFILES": str(tmp_path)}
    path = profile_path(tmp_path, platform="cpu", device_kind="cpu", num_devices=8, host="a host")
    merge_profile(path, replace(FULL, host="elsewhere"))
    missing = find_profile("cpu", "cpu", 8, environ=environ, host="a host")
    assert isinstance(missing, NoProfile)
    assert missing.reason.endswith("is of other devices: 8 x cpu on elsewhere")


def test_a_place_that_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "p.json", Path("/proc/nowhere/p.json")):
        with pytest.raises(UsageError, match="cannot be written") as caught:
            check_place(path)
        assert "AUTOMESH_PROFILES" in caught.value.hint
        with pytest.raises(UsageError, match="cannot be written"):
            merge_profile(path, FULL)
    check_place(tmp_path / "new" / "p.json")


def test_the_folder_is_the_users_own_unless_the_environment_says() -> None:
    assert profile_folder({"AUTOMESH_PROFILES": "/x/y"}) == Path("/x/y")
    assert profile_folder({}).parts[-2:] == ("automesh", "profiles")
    assert host_of("tpu") == ""
    assert "core" in host_of("cpu")
