"""A database with damaged rows: they are left out and named, and all others count."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from automesh.errors import UsageError
from automesh.tuner.study.backend import open_backend
from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.study import Study, open_study
from tests.support.postgres import new_database
from tests.support.samples.storage_cases import compiled, opened, plans

pytest_plugins = ("tests.support.storage_fixtures",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of three compiled plans and one that waits."""
    storage = parse_storage("", tmp_path_factory.mktemp("whole"))
    with opened(storage) as study:
        study.lead()
        study.compile.enqueue(plans(4))
        for number in range(1, 4):
            trial = study.compile.claim()
            assert trial is not None
            study.compile.finish(trial, compiled(number / 10))
        study.note("footer", {"a": 1})
        study.note("header", {"b": 2})
    return Path(storage.location)


@pytest.fixture
def storage(whole: Path, tmp_path: Path) -> Storage:
    """A copy of it, to be damaged."""
    shutil.copy(whole, tmp_path / "study.db")
    return parse_storage("", tmp_path)


@pytest.fixture
def shared(postgres_url: str, tmp_path: Path) -> Storage:
    """An empty database on a server."""
    return parse_storage(new_database(postgres_url), tmp_path)


def execute(storage: Storage, statement: str, *values: object) -> None:
    connection = sqlite3.connect(storage.location)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def seconds(study: Study) -> list[float | None]:
    return [getattr(one.outcome, "step_s", None) for one in study.compile.trials()]


def attribute(key: str, value: str) -> str:
    """A statement that changes an attribute of the second trial."""
    where = f"WHERE trial_id = 2 AND key = '{key}'"
    return f"UPDATE trial_user_attributes SET value_json = '{value}' {where}"


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE trials SET state = 'COMPLETX' WHERE number = 1",
        "UPDATE trials SET number = 'one' WHERE number = 1",
        "UPDATE trials SET datetime_start = 'now' WHERE number = 1",
        attribute("plan", "{"),
        attribute("plan_json", '"{"'),
        attribute("versions", "[]"),
        attribute("outcome", "7"),
        attribute("owner", "7"),
        attribute("attempts", '"x"'),
        "UPDATE trial_params SET distribution_json = '{}' WHERE trial_id = 2",
        "UPDATE trial_values SET value_type = 'SO_SO' WHERE trial_id = 2",
        "UPDATE trial_user_attributes SET value_json = CAST(x'22ff22' AS TEXT) "
        "WHERE trial_id = 2 AND key = 'plan_json'",
        "UPDATE trial_user_attributes SET key = NULL WHERE trial_id = 2 AND key = 'plan_json'",
        "UPDATE trial_user_attributes SET key = x'ff' WHERE trial_id = 2 AND key = 'versions'",
    ],
)  # fmt: skip
def test_one_damaged_trial_does_not_block_the_others(storage: Storage, damage: str) -> None:
    execute(storage, damage)
    with opened(storage) as study:
        assert seconds(study) == [0.1, 0.3, None]
        assert len(study.skipped.named) == 1
        assert " is damaged and left out: " in study.skipped.notices()[0]
        # Its plan is tried again.
        study.lead()
        assert [str(one.plan) for one in study.compile.enqueue(plans(4))] == [str(plans(4)[1])]
        trial = study.compile.claim()
        assert trial is not None
        assert study.compile.finish(trial, compiled(0.4)) == "stored"


def test_a_damaged_attribute_in_deep_brackets(storage: Storage) -> None:
    deep = "[" * 200_000
    execute(
        storage,
        "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = 2 AND key = 'plan'",
        deep,
    )
    with opened(storage) as study:
        assert seconds(study) == [0.1, 0.3, None]


def test_an_open_trial_that_is_damaged_is_not_claimed(storage: Storage) -> None:
    execute(
        storage,
        "UPDATE trial_user_attributes SET value_json = '\"no\"' "
        "WHERE trial_id = 4 AND key = 'plan_json'",
    )
    with opened(storage) as study:
        assert study.compile.claim() is None
        assert list(study.skipped.named) == ["trial 3 of `compile`"]


def test_a_damaged_note_is_left_out(storage: Storage) -> None:
    execute(
        storage,
        "UPDATE study_user_attributes SET value_json = '{' WHERE key = 'automesh.footer'",
    )
    with opened(storage) as study:
        assert study.noted("footer") is None
        assert study.noted("header") == {"b": 2}
        assert list(study.skipped.named) == ["the note `footer`"]
        study.note("footer", {"a": 3})
        assert study.noted("footer") == {"a": 3}


def test_studies_over_the_same_connections_name_their_own_damage(storage: Storage) -> None:
    execute(
        storage,
        "UPDATE study_user_attributes SET value_json = '{' WHERE key = 'automesh.footer'",
    )
    with opened(storage) as study:
        name = study.name
    with closing(open_backend(storage)) as backend:
        for _ in range(2):
            with open_study(storage, name, create=False, backend=backend.lent()) as study:
                assert study.noted("footer") is None
                assert list(study.skipped.named) == ["the note `footer`"]
        assert backend.skipped.named == {}
        assert backend.has_search(name)
        assert not backend.has_search("other")
        other = backend.lent()
        assert other is not None
        assert other.leases.seen is backend.leases.seen


def test_a_note_without_a_name_is_left_out(storage: Storage) -> None:
    execute(storage, "UPDATE study_user_attributes SET key = x'ff' WHERE key = 'automesh.footer'")
    with opened(storage) as study:
        assert study.noted("header") == {"b": 2}
        assert list(study.skipped.named) == ["the note of the name b'\\xff'"]


def test_what_is_damaged_in_another_study_is_not_told_of_this_one(storage: Storage) -> None:
    with open_study(storage, "other") as study:
        study.note("header", {"c": 1})
    execute(
        storage,
        "UPDATE study_user_attributes SET value_json = '{' WHERE key = 'automesh.header' "
        "AND study_id = (SELECT study_id FROM studies WHERE study_name = 'other/compile')",
    )
    with open_study(storage, "lm-cpu-8-1234", create=False) as study:
        assert study.noted("header") == {"b": 2}
        assert study.skipped.named == {}


@pytest.mark.parametrize("kind", ["view", "trigger"])
def test_what_would_run_when_it_is_read_is_refused(storage: Storage, kind: str) -> None:
    """Before, a view without an end in place of a table kept whoever read it for ever."""
    execute(
        storage,
        "CREATE VIEW odd AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
        "SELECT x FROM c"
        if kind == "view"
        else "CREATE TRIGGER odd AFTER INSERT ON trials BEGIN DELETE FROM studies; END",
    )
    with pytest.raises(UsageError, match=f"has the {kind} `odd`, which automesh did not create"):
        opened(storage)


@pytest.mark.parametrize("choices", ["[]", "7", '{"knob.microbatches": "x"}', "{"])
def test_damaged_choices_are_made_anew(storage: Storage, choices: str) -> None:
    execute(
        storage,
        "UPDATE study_user_attributes SET value_json = ? WHERE key = 'choices'",
        choices,
    )
    with opened(storage) as study:
        study.lead()
        assert len(study.compile.enqueue(plans(5))) == 1
        assert seconds(study) == [0.1, 0.2, 0.3, None, None]


def test_a_damaged_schema_is_one_sentence(storage: Storage) -> None:
    execute(
        storage,
        "UPDATE study_user_attributes SET value_json = '\"1\"' WHERE key = 'automesh_schema'",
    )
    with pytest.raises(UsageError, match=r"is damaged: its schema is '1'") as caught:
        opened(storage)
    assert "--new" in caught.value.hint


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("owner", "{"),
        ("owner", '{"host": 1}'),
        ("owner", b"\xff"),
        ("renewed_s", "soon"),
        ("renewed_s", float("inf")),
        ("version", "x"),
    ],
)
def test_a_damaged_hold_is_taken_over(storage: Storage, column: str, value: object) -> None:
    with opened(storage) as first:
        assert first.lead()
        execute(storage, f"UPDATE automesh_holds SET {column} = ?", value)
        with opened(storage) as second:
            assert second.lead()
            assert list(second.skipped.named) == ["the hold `lm-cpu-8-1234/lease`"]
            trial = second.compile.claim()
            assert trial is not None
        assert not first.heartbeat()


@pytest.mark.parametrize("pid", [-1, 0, 10**30])
def test_an_owner_with_an_impossible_process_is_dead(storage: Storage, pid: int) -> None:
    with opened(storage) as first:
        assert first.lead()
        owner = {"host": "h", "machine": first.owner.machine, "pid": pid, "start": "1"}
        text = json.dumps({**owner, "token": "t"}, sort_keys=True)
        execute(storage, "UPDATE automesh_holds SET owner = ?", text)
        with opened(storage) as second:
            assert second.leader() is None
            assert second.lead()


def use(storage: Storage) -> None:
    """What a search does with a study."""
    with opened(storage) as study:
        study.lead()
        study.compile.adopt_expired()
        study.compile.enqueue(plans(5))
        trial = study.compile.claim()
        if trial is not None:
            study.compile.finish(trial, compiled(0.4))
        study.noted("footer")
        study.note("footer", {"a": 2})
        study.compile.trials()
        study.measure.trials()


@pytest.mark.parametrize("seed", range(16))
def test_flipped_bytes_give_a_sentence_or_are_left_out(storage: Storage, seed: int) -> None:
    dice = random.Random(seed)
    path = Path(storage.location)
    data = bytearray(path.read_bytes())
    # In texts, whose flips SQLite does not notice, and anywhere.
    texts = [at for at, byte in enumerate(data) if 0x20 <= byte < 0x7F]
    for _ in range(dice.choice((1, 3, 20))):
        at = dice.choice(texts) if dice.random() < 0.8 else dice.randrange(len(data))
        data[at] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    try:
        use(storage)
    except UsageError as error:
        assert "\n" not in error.message
        assert len(error.message) < 1000


@pytest.mark.parametrize("size", [0, 1, 15, 16, 99, 100, 4095, 4096, 4097, 20_000])
def test_a_truncated_database_is_refused_and_kept(storage: Storage, size: int) -> None:
    path = Path(storage.location)
    data = path.read_bytes()[:size]
    path.write_bytes(data)
    try:
        use(storage)
    except UsageError as error:
        assert "\n" not in error.message
        assert path.read_bytes() == data
    else:
        assert size == 0


def test_damage_on_a_server_is_left_out_and_named(shared: Storage) -> None:
    with opened(shared) as study:
        assert study.lead()
        first, second = study.compile.enqueue(plans(2))
        study.note("footer", {"a": 1})
        engine = sa.create_engine(shared.location)
        with engine.begin() as connection:
            for statement in (
                "UPDATE trial_user_attributes SET value_json = '{' "
                f"WHERE trial_id = {first.storage_id} AND key = 'plan_json'",
                "UPDATE study_user_attributes SET value_json = '[' WHERE key = 'automesh.footer'",
                "UPDATE automesh_holds SET owner = '{}'",
            ):
                assert connection.execute(sa.text(statement)).rowcount == 1
        engine.dispose()
    with opened(shared) as study:
        assert study.lead()
        assert study.noted("footer") is None
        assert [one.plan for one in study.compile.trials()] == [second.plan]
        trial = study.compile.claim()
        assert trial is not None
        assert trial.plan == second.plan
        assert set(study.skipped.named) == {
            "the hold `lm-cpu-8-1234/lease`",
            "the note `footer`",
            f"row {first.storage_id} of `trials`",
        }
