"""Inputs that are wrong in every way that somebody could think of, each as a row.

A row is what is typed, which files and variables there are besides those of `places`, and what the
error must name. Families are generated: each option of each command with each text that is wrong
for its kind, each key of each file with each value that it cannot have.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from automesh.texts.terminal import clean
from tests.support.cases.bad_inputs import CLUSTER, GOOD_SPACE, RULES, TORUS, UNUSED

DIGITS = "9" * 5_000  # more than Python makes an integer of
BYTE = "caf\udce9"  # how Python keeps the bytes `caf\xe9`
ESCAPES = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202egnp.exe"
NUL = "nul\0byte"
HUGE = "a" * 20_000
LONG = "x" * 300  # more than the name of a file can have


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """An input that must be refused.

    Attributes:
      name: of the row.
      words: what is typed after `automesh`.
      says: what the error must name: any of these.
      files: relative path -> content, for this row alone.
      variables: environment.
    """

    name: str
    words: tuple[str, ...]
    says: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def places(folder: Path) -> None:
    """Makes the files, folders, links, pipes and devices that rows name."""
    (folder / "train.py").write_text(UNUSED)
    (folder / "results-are-here").mkdir()
    (folder / "note").write_text("mine\n")
    for ending in ("", ".py", ".toml", ".json"):
        os.mkfifo(folder / f"pipe{ending}")
        (folder / f"folder{ending}").mkdir()
        (folder / f"loop{ending}").symlink_to(f"loop{ending}")
        (folder / f"nowhere{ending}").symlink_to("missing/file")
        (folder / f"device{ending}").symlink_to("/dev/zero")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("__main__.py", UNUSED)
    (folder / "zip.py").write_bytes(packed.getvalue())
    (folder / "archive.zip").write_bytes(packed.getvalue())
    (folder / "nul.py").write_bytes(b"x = 1\n\0\n")
    (folder / "wide.py").write_text(UNUSED, encoding="utf-16")
    (folder / "elf.py").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(64))
    (folder / "empty.json").write_text("")
    (folder / "good.toml").write_text(
        'schema = 1\naxes = ["dp", "tp"]\n[[rule]]\nmatch = "cpu-4"\nici = { dp = 4 }\n'
    )
    (folder / "good.yml").write_text("ici_fsdp_parallelism: 4\nper_device_batch_size: 1\n")
    for name in ("sparse.py", "sparse.toml"):
        (folder / name).touch()
        os.truncate(folder / name, 2**40)


def shown(text: str) -> str:
    """What of a text an error must show: its beginning, as far as a terminal may have it."""
    return clean(text)[:8].strip() or f"`{text}`"


# Texts that are wrong for a kind of option.

NO_TEXT = (NUL, BYTE)
INTEGERS = ("", " ", "x", "1.5", "-1", "nan", "inf", "1e3", "½", DIGITS, NUL, "1\n2", ESCAPES)
DURATIONS = (
    *("", "x", "0", "-5m", "nan", "inf", "1e400", "10 parsecs", "１０m", "1,5h", "5m 3s", DIGITS),
    *(f"{DIGITS}h", "99999999999d", NUL, BYTE, "1m\n2", ESCAPES, HUGE),
)
SIZES = (
    *("x", "-1GiB", "nan", "inf", "1e9", "８GiB", "1 GiB GiB", DIGITS, f"{DIGITS}TiB", NUL, BYTE),
    *("99999999999TiB", "0.1", "1\n2", ESCAPES, HUGE),
)
TARGETS = (
    *("", " ", "x", "cpu", "cpu:", "cpu:0", "cpu:-1", "cpu:1.5", "cpu:nan", "cpu:٣", "LOCAL", "["),
    *(
        f"cpu:{DIGITS}",
        "cpu:4096000",
        "cpu:4*0",
        "cpu:4*2*2",
        "cpu:1*1000",
        f"cpu:1*{DIGITS}",
        f"tpu-v5p-{DIGITS}",
        f"v5e:4x4*{DIGITS}",
        "gpu-h100-0",
    ),
    *(f"v5p:{DIGITS}x4x4", f"gpu-h100-{DIGITS}", "tpu-v5p-٣", "v5p:0x0x0", "../../etc/passwd"),
    *(NUL, BYTE, "cpu:4\ncpu:8", ESCAPES, HUGE, "cpu:8;rm", "local\0", "*", "tpu-*"),
)
_NAMES = ("~nosuchuser/x", NUL, BYTE, HUGE, LONG, "two\nlines\udce9")
READ = (
    *(f"{name}.toml" for name in (*_NAMES, "pipe", "loop", "device", "folder", "nowhere")),
    *("sparse.toml", "/dev/zero", "/proc/self/mem", "missing.toml", ESCAPES, "note", "archive.zip"),
)
SPACES = (*READ, "dens_lm", "../auto", "auto\n")
RULES_FILES = (
    *("~nosuchuser/x", NUL, BYTE, HUGE, LONG, "two\nlines\udce9", ".", "/", "..", "note", "note/x"),
    *("pipe.toml", "loop.toml", "device.toml", "folder.toml", "nowhere.toml", "no/folder/x"),
    *("/dev/null", "/dev/zero", "sparse.toml", f"{ESCAPES}/x", "archive.zip"),
)
RESULTS = (
    *("~nosuchuser/x", NUL, BYTE, HUGE, LONG, "pipe", "loop", "device", "note", "note/deep"),
    *("/dev/null", "/proc/automesh", "/proc/self/fd/999", "two\nlines\udce9"),
)
STORAGES = (
    *("x", "redis://h", "sqlite://", "sqlite:///", "sqlite:///:memory:", "journal:", "file:x.db"),
    *("postgresql:", "postgresql://", "postgresql:///", "mysql:x", f"{NUL}.db", f"{BYTE}.db"),
    *("~nosuchuser/x.db", "~nosuchuser/x.journal", "sqlite:///~nosuchuser/x.db", "http://[::1"),
    *(ESCAPES, HUGE),
)
PERCENTS = (
    *("", "x", "-1%", "nan%", "inf%", "1e999%", "5%%", "٥%", f"{DIGITS}%x", NUL, BYTE, ESCAPES),
)
PAIRS = ("", "x", "=", "a=", "=b", NUL, BYTE)
OUTPUTS = (
    *(f"{NUL}.json", f"{HUGE}.json", f"{LONG}.json", "pipe.json", "loop.json", "device.json", ""),
    *("folder.json", "empty.json", "note/x.json", "note", ".", "/dev/null", ".json", ESCAPES),
    *("~nosuchuser/x.json", "/proc/nothing/x.json"),
)
BESIDE = (
    *(f"{NUL}.xml", BYTE, f"{HUGE}.xml", "pipe", "device", "folder", "note/x.xml", "/dev/null"),
    *("~nosuchuser/x.xml", "/proc/nothing/x.xml"),
)
STEPS = ("x", ".", "a.b", NUL, BYTE, "1", "a b", ESCAPES, HUGE)
ADDRESSES = (
    *(" ", "x:y", ":80", "host:", "::1:80", "[::1", "host:65536", f"host:{DIGITS}", "host:٣"),
    *("host:-1", "http://host:80", "host/x:80", "a b:80", NUL, BYTE, ESCAPES, HUGE),
)
PEM_FILES = (
    *(NUL, BYTE, HUGE, LONG, "missing", "note", "pipe", "folder", "device", "loop", "nowhere"),
    *("~nosuchuser/x", "sparse.toml", ESCAPES),
)
SPLITS = (
    *("", "x", "=", "data=", "data=a", "data=a,a", "data=data,b", "a b=c,d", "data=a;b", "1=a,b"),
    *("data=a,b=c", f"data={NUL},b", f"data={BYTE},b", f"{ESCAPES}=a,b", HUGE),
)
OPTIONS = (
    *(
        "",
        "x",
        "=",
        "=1",
        "a b=1",
        "x=",
        "x=,",
        "x=1,1",
        "1x=1",
        f"x={2**63}",
        f"x={NUL}",
        f"x={BYTE}",
        HUGE,
    ),
    *(f"{ESCAPES}=1", f"x={'[' * 3000}", f"x={DIGITS}", "x=nan", "x=inf"),
)
TEMPLATES = (
    *(" ", "\n", "'", '"', "{tp}", "python {", "python }", "python {}", "python {tp", "python {٣}"),
    *("python {0}", "python {t p}", "python {tp!r}", "python {tp:>9}", "python {ici.}", "nosuch"),
    *(
        "python {.tp}",
        "python ${tp}",
        f"python {NUL} {{tp}}",
        "./note {tp}",
    ),
    *(f"{BYTE} {{tp}}", f"python {BYTE} {{tp}}", "X=1 python {tp}", "| {tp}", "train.py {tp}"),
    *("folder.py {tp}", "~nosuchuser/x {tp}", "/dev/null {tp}", "pipe {tp}", f"{ESCAPES} {{tp}}"),
    *(f"python {{{HUGE}-}}", "python {tp} ; rm", "python {tp} && x"),
)
SOURCES = (
    *("x", "capture:x", "jsonl", "jsonl:", "jsonl::", "jsonl:{tp}/x", "jsonl:http://x/y", "regex:"),
    *("regex:(", "regex:[", "regex:x", "regex:(a)(b)", "regex:(?P<x>a)", "regex:(?P<s>a)(?P<ms>b)"),
    *(f"regex:{'(' * 3000}", f"regex:a{{{DIGITS}}}", f"jsonl:{NUL}", f"jsonl:{BYTE}", ESCAPES),
    *(f"regex:{NUL}(", f"regex:({ESCAPES}"),
)
SCRIPTS = (
    *("", " ", ".", "/", ":", "::", ":build", "train.py:", "train.py:a b", "train.py:1x", "-"),
    *("train.py:a.1", "train.py:Trainer.build", "train.py:.a", "train.py:a.", "train.py:a..b"),
    *("train.py:a-b", f"train.py:{NUL}", f"train.py:{BYTE}", f"train.py:{HUGE}-", "~nosuchuser"),
    *("~nosuchuser/x.py", "~nosuchuser/x.py:build", f"{NUL}.py", f"{BYTE}.py", f"{BYTE}/train.py"),
    *(f"{HUGE}.py", f"{LONG}.py", f"{ESCAPES}.py", "two\nlines.py", "folder.py", "folder.py:build"),
    *("pipe.py", "pipe.py:build", "loop.py", "loop.py:build", "device.py", "device.py:build"),
    *("nowhere.py", "nowhere.py:build", "sparse.py", "zip.py", "zip.py:build", "archive.zip"),
    *("nul.py", "wide.py", "elf.py", "/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem"),
    *("trian.py", "train.pyc", "train", "pkg.module", "a..b:c", "http://x/train.py", "train.py/x"),
    *("train.py\n", " train.py", "\ufefftrain.py"),
)
STUDIES = (
    *(NUL, BYTE, HUGE, LONG, "~nosuchuser/x", "pipe", "loop", "device", "nowhere", "/dev/zero"),
    *("/dev/null", "results-are-here", "missing", ESCAPES, "two\nlines", "/proc/self/mem"),
)
PATTERNS = ("zz", "[", "v5p[", "*zz*", NUL, BYTE, HUGE, DIGITS, f"v5p-{DIGITS}", ESCAPES, "[!a-]")
COMMANDS = ("serch", "", NUL, BYTE, ESCAPES, HUGE, "--nope", f"--{ESCAPES}", f"--{BYTE}", "-Z")

SERVERS = (
    *("x", "ftp://127.0.0.1", "http://", "https://", "http://mesh.example.com", "http://[::1"),
    *("http://a:b@127.0.0.1", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://127.0.0.1:1"),
    *("http://127.0.0.1 /", NUL, BYTE, ESCAPES, f"https://{HUGE}", "https://mesh.example.com/path"),
)

HOSTS: Mapping[str, tuple[str, ...]] = {
    "--launch": ("x", "LOCAL", "local ", NUL, BYTE, ESCAPES, HUGE),
    "--hosts": ("1", "99999999999", *INTEGERS),
    "--processes-per-host": ("1", "3", "99999999999", *INTEGERS),
    "--listen": ADDRESSES,
    "--wait": DURATIONS[1:],  # an empty one is as none
    "--certificate": ("note", NUL, BYTE, HUGE, LONG, "loop", "~nosuchuser/x"),
    "--key": ("note", NUL, BYTE, HUGE, LONG, "loop", "~nosuchuser/x"),
    "--ca": ("note", NUL, BYTE, HUGE, LONG, "loop", "~nosuchuser/x"),
}
"""Of commands that may use several hosts."""
WRONG: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "search": {
        "--step-time": ("capture", "regex:("),
        "--skip-steps": ("0", *INTEGERS),
        "--timed-steps": ("0", *INTEGERS),
        "--target": TARGETS,
        "--hardware": (*READ, "/"),
        "--space": SPACES,
        "--module": ("x.y", "a b", NUL),
        "--entry": ("nobody-has-this", "a b", NUL),
        "--step": STEPS,
        "--split": SPLITS,
        "--budget": DURATIONS,
        "--top": ("0", *INTEGERS),
        "--baseline": NO_TEXT,
        "--rules": RULES_FILES,
        "--results": RESULTS,
        "--storage": STORAGES,
        "--workers": INTEGERS,
        "--timeout": DURATIONS,
        "--worker-memory": ("0", *SIZES),
        "--reserve-hbm": (*SIZES, "100%", "-5%", "nan%", "5%%", "٥%"),
        "--xla": OPTIONS,
        "--command": ("python {tp}",),
        **HOSTS,
        "--image": ("x", NUL, BYTE),
        "--volume": ("x:/y", NUL, BYTE),
        "--write": ("x.yaml",),
        "--server": SERVERS,
    },
    "kubernetes": {
        "--target": ("local", "cpu:8", "tpu-v5litepod-8", "gpu-h100-8", "x", NUL, DIGITS),
        "--hosts": ("1", "3", DIGITS),
        "--processes-per-host": ("2", "3", DIGITS),
        "--listen": ("10.0.0.1:8600", *ADDRESSES),
        "--image": ("", " ", "a b", "-x", ".", "a\nb", "a:", NUL, BYTE, ESCAPES, HUGE),
        "--volume": ("", "x", ":", "x:", "x:y", ":/y", "X:/y", "x:/y:z", NUL, BYTE, ESCAPES, HUGE),
        "--write": (*OUTPUTS[:6], "folder.json", "note/x.json", ".", "~nosuchuser/x.json"),
        "--storage": ("postgresql://me:secret@host/db",),
    },
    "command": {
        "--command": TEMPLATES,
        "--step-time": SOURCES,
        "--timed-steps": ("0", NUL, DIGITS),
        "--target": ("x", NUL, BYTE, DIGITS, "tpu-v5p-8", ESCAPES),
        "--hardware": (NUL, BYTE, "our.toml", ESCAPES),
        "--space": SPACES,
        "--step": STEPS,
        "--split": ("a=b,c",),
        "--budget": ("x", DIGITS, NUL),
        "--baseline": (*NO_TEXT, "x", "tp", "tp:0", "tp:-1,tp:-1", f"tp:{DIGITS}", "tp:٤", ESCAPES),
        "--rules": RULES_FILES,
        "--results": RESULTS,
        "--storage": STORAGES,
        "--workers": ("1",),
        "--reserve-hbm": ("1GiB",),
        "--xla": ("a=1",),
    },
    "check-script": {
        "--target": TARGETS,
        "--hardware": READ,
        "--space": SPACES,
        "--step": STEPS,
        "--split": SPLITS,
        "--baseline": NO_TEXT,
        "--timeout": DURATIONS,
        "--module": ("x.y", "a b", NUL),
        "--entry": ("nobody-has-this", "a b", NUL),
    },
    "lint": {
        "--target": TARGETS[1:],  # an empty one is as none
        "--hardware": READ,
        "--space": SPACES,
        "--step": STEPS,
        "--split": SPLITS,
        "--baseline": NO_TEXT,
        "--timeout": DURATIONS,
        "--module": ("x.y", "a b", NUL),
        "--entry": ("nobody-has-this", "a b", NUL),
        "--sarif": BESIDE,
    },
    "show": {
        "--results": (NUL, BYTE, HUGE, LONG, "pipe", "loop", "device", "note", "missing"),
        "--storage": STORAGES,
        "--top": ("0", *INTEGERS),
    },
    "report": {
        "--out": (NUL, BYTE),
        "--results": (NUL, BYTE, HUGE, LONG, "pipe", "loop", "device", "note", "missing"),
        "--storage": STORAGES,
    },
    "targets": {"--hardware": READ},
    "calibrate": {"--target": TARGETS, "--out": OUTPUTS, "--budget": DURATIONS, **HOSTS},
    "explain": {
        "--against": NO_TEXT,
        "--target": TARGETS[1:],  # an empty one is as none
        "--hardware": READ,
        "--space": SPACES,
        "--storage": NO_TEXT,
        "--trace": (NUL, BYTE, "note"),
    },
    "doctor": {"--target": TARGETS},
    "agent": {"--name": NO_TEXT, "--wait": DURATIONS, "--ca": PEM_FILES},
    "hosts": {"--ca": PEM_FILES},
    "agent of a service": {
        "--server": SERVERS,
        "--takes": ("", "a b", "(a*)*", "a/b", NUL, BYTE, ESCAPES, HUGE),
        "--has": ("", "a b", "*", "-x", NUL, BYTE, ESCAPES, HUGE),
        "--folder": (NUL, BYTE, HUGE, LONG, "loop", "note", "pipe", "device", "~nosuchuser/x"),
    },
    "serve": {
        "--listen": ADDRESSES,
        "--results": (NUL, BYTE, HUGE, LONG, "loop", "note", "pipe", "device", "~nosuchuser/x"),
        "--storage": (NUL, BYTE, ESCAPES, "x", "http://x/y", "mysql:", "postgresql://a:b@h/d"),
        "--home": (NUL, BYTE, HUGE, LONG, "loop", "note", "pipe", "device", "~nosuchuser/x"),
        "--hostname": ("", "a b", "a/b", "a@b", NUL, BYTE, ESCAPES),
        "--proxy": ("", "a b", "proxy.example.com", "10.0.0", "10.0.0.1:80", NUL, BYTE, ESCAPES),
        "--certificate": (NUL, BYTE, "missing", "note", "pipe", "folder", "device"),
        "--key": (NUL, BYTE, "missing", "note", "pipe", "folder", "device"),
        "--searches": ("99999", *INTEGERS),
        "--keep": DURATIONS,
    },
    "submit": {
        "--server": SERVERS,
        "--folder": (NUL, BYTE, HUGE, LONG, "loop", "missing", "note", "/proc/self/mem"),
        "--target": NO_TEXT,
        "--space": (NUL, BYTE, "a b", "missing.toml", "pipe.toml", "/etc/x.toml", ESCAPES),
        "--budget": DURATIONS,
        "--top": ("0", *INTEGERS),
        "--baseline": NO_TEXT,
        "--rules": (NUL, BYTE, HUGE, "loop"),
        "--need": ("", "a b", "*", "-x", NUL, BYTE, ESCAPES, HUGE),
    },
    "token": {
        "--scope": ("", "x", "READ", "admin ", NUL, BYTE, ESCAPES, HUGE),
        "--expires": DURATIONS,
        "--home": (NUL, BYTE, HUGE, LONG, "loop", "note", "pipe", "device"),
        "--revoke": (NUL, BYTE, ESCAPES, "x"),
    },
    "check": {
        "--rules": READ,
        "--select": NO_TEXT,
        "--against": NO_TEXT,
        "--hardware": READ,
        "--step": STEPS,
        "--memory": PERCENTS,
        "--flops": PERCENTS,
        "--collectives": PERCENTS,
        "--time": PERCENTS,
        "--timeout": DURATIONS,
        "--junit": BESIDE,
        "--markdown": BESIDE,
    },
    "export": {
        "--to": ("", "x", "MAXTEXT", "maxtext ", NUL, BYTE, ESCAPES, HUGE),
        "--select": NO_TEXT,
        "--batch": ("0", *INTEGERS),
        "--axis": PAIRS,
        "--remat": PAIRS,
        "--knob": PAIRS,
        "--leave-out": NO_TEXT,
        "--out": NO_TEXT,
    },
    "import": {
        "--from": ("", "x", "MAXTEXT", "maxtext ", NUL, BYTE, ESCAPES, HUGE),
        "--target": NO_TEXT,
        "--match": NO_TEXT,
        "--axis": PAIRS,
        "--remat": PAIRS,
        "--out": NO_TEXT,
    },
}
"""By command and option, texts that must be refused."""

_BASES: Mapping[str, tuple[str, ...]] = {
    "search": ("search", "train.py", "--target", "cpu:4"),
    "kubernetes": (
        *("search", "train.py", "--target", "cpu:4*2", "--launch", "kubernetes"),
        *("--image", "i", "--volume", "c:/w", "--write", "jobset.yaml"),
    ),
    "command": ("search", "--target", "cpu:4", "--command", "python train.py {tp}"),
    "check-script": ("check-script", "train.py", "--target", "cpu:4"),
    "lint": ("lint", "train.py", "--target", "cpu:4"),
    "show": ("show", "results-are-here"),
    "report": ("report", "results-are-here"),
    "targets": ("targets", "v5p"),
    "presets": ("presets", "qwen3-1.7b"),
    "calibrate": ("calibrate", "--target", "cpu:2"),
    "explain": ("explain", "train.py", "dp:4"),
    "doctor": ("doctor",),
    "agent": ("agent", "127.0.0.1:1"),
    "hosts": ("hosts", "127.0.0.1:1"),
    "agent of a service": ("agent", "--server", "http://127.0.0.1:1"),
    "serve": ("serve",),
    "submit": ("submit", "train.py", "--server", "http://127.0.0.1:1"),
    "token": ("token", "ann"),
    "check": ("check", "train.py", "--rules", "good.toml"),
    "export": ("export", "good.toml", "--to", "maxtext"),
    "import": ("import", "good.yml", "--from", "maxtext"),
}
# What an error may call an option instead, where its text is only a part of what is wrong.
_CALLED = {
    "--command": ("command",),
    "--step-time": ("pattern", "regular expression"),
    "--xla": ("compiler option",),
    "--baseline": ("baseline",),
    "--results": ("results",),
    "--storage": ("~nosuchuser",),
    "--trace": ("cannot be replayed",),
    "--hosts": ("hosts",),
    "--processes-per-host": ("hosts", "one host"),
    "--image": ("image",),
    "--volume": ("volume",),
    "--write": ("jobset",),
}


def _without(words: Sequence[str], option: str) -> tuple[str, ...]:
    """The words without an option and its text, since it is given with another one."""
    if option not in words:
        return tuple(words)
    place = words.index(option)
    return (*words[:place], *words[place + 2 :])


def options() -> Iterator[Hostile]:
    """Every option of every command."""
    for family, by_option in WRONG.items():
        for option, texts in by_option.items():
            words = _without(_BASES[family], option)
            if family in ("show", "report") and option == "--results":
                words = (family,)
            for text in texts:
                yield Hostile(
                    name=f"{family} {option} {ascii(text)[1:25]}",
                    words=(*words, f"{option}={text}"),
                    says=(option, shown(text), *_CALLED.get(option, ())),
                )


def arguments() -> Iterator[Hostile]:
    """What stands without an option: scripts, studies, patterns, commands."""

    def row(name: str, words: tuple[str, ...], text: str, *more: str) -> Hostile:
        name = f"{name} {ascii(text)[1:25]}"
        return Hostile(name=name, words=words, says=(shown(text.partition(":")[0]), *more))

    for text in SCRIPTS:
        for command in ("search", "check-script", "lint"):
            words = (command, "--target", "cpu:4", "--", text)
            yield row(f"{command} SCRIPT", words, text, shown(text))
    for text in STUDIES:
        yield row("show", ("show", "--", text), text, "'STUDY'")
        yield row("report", ("report", "--", text), text, "'STUDY'")
        yield row("explain", ("explain", "--", text, "dp:4"), text)
    for text in PATTERNS:
        yield row("targets", ("targets", "--", text), text)
        yield row("presets", ("presets", "--", text), text)
    for text in ADDRESSES:
        for command in ("agent", "hosts"):
            yield row(f"{command} ADDRESS", (command, "--", text), text, "address", "ADDRESS")
    for text in SCRIPTS:
        yield row("submit SCRIPT", ("submit", "--", text), text, shown(text))
    for text in ("", "a b", "-x", NUL, BYTE, ESCAPES, HUGE, "../x"):
        yield row("token NAME", ("token", "--", text), text, "name")
    for text in COMMANDS:
        yield row("command", (text,), text, "command", "option")
    for text in NO_TEXT:
        yield row("search ARGS", (*_BASES["search"], "--", "--data", text), text)
        yield row("explain MESH", ("explain", "train.py", text), text)
        yield row("lint MESH", ("lint", "train.py", text), text)
    for command, words in _BASES.items():
        for flag in ("--json=1", "--json=", "--nosuch", "--nosuch=1", "-q"):
            yield row(f"{command} {flag}", (*words, flag), flag.partition("=")[0])


# Files that people write: what is wrong for any of them, and what for each.

_ANY: tuple[tuple[str, bytes], ...] = (
    ("deep", b"x = " + b"[" * 3_000 + b"]" * 3_000),
    ("deep tables", b"[" + b".".join([b"a"] * 3_000) + b"]\nx = 1\n"),
    ("deep inline tables", b"x = " + b"{ a = " * 3_000 + b"1" + b" }" * 3_000),
    ("digits", f"schema = {DIGITS}\n".encode()),
    ("nul", b"schema = 1\0\n"),
    ("only nul", bytes(64)),
    ("latin", "gr\xfc\xdfe = 1\n".encode("latin-1")),
    ("utf-16", "schema = 1\n".encode("utf-16")),
    ("zip", b"PK\x03\x04" + bytes(60)),
    ("cut", b'schema = 1\nx = "'),
    ("bom alone", b"\xef\xbb\xbf"),
    ("bom and nonsense", b"\xef\xbb\xbfschema\n"),
    ("carriage returns", b"schema = 1\rx\r"),
    ("crlf nonsense", b"schema = 1\r\nx\r\n"),
    ("twice", b"schema = 1\nschema = 1\n"),
    ("date", b"schema = 1979-05-27\n"),
    ("nan", b"schema = nan\n"),
    ("escape in a key", b'"\\u001b[31mred" = 1\n'),
    ("direction in a key", '"\u202egnp" = 1\n'.encode()),
    ("escape in a value", b'schema = "\\u001b]0;owned\\u0007"\n'),
    ("raw escape", b"schema = \x1b[31m\n"),
    ("long key", f"{HUGE} = 1\n".encode()),
    ("long value", f'schema = "{HUGE}"\n'.encode()),
    ("many keys", b"".join(b"k%d = 1\n" % number for number in range(2_000))),
)
_JSON: tuple[tuple[str, bytes], ...] = (
    ("deep", b"[" * 100_000),
    ("deep objects", b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
    ("digits", b'{"schema": ' + DIGITS.encode() + b"}"),
    ("nan", b'{"schema": NaN}'),
    ("infinite", b'{"schema": 1e999}'),
    ("lone surrogate", b'{"schema": "\\udce9"}'),
    ("surrogate in a key", b'{"\\ud800": 1}'),
    ("no object", b"[1, 2]"),
    ("null", b"null"),
    ("empty", b""),
    ("bom", b"\xef\xbb\xbf{"),
    ("nul", b'{"schema": "\\u0000"}'),
    ("latin", b'{"gr\xfc\xdfe": 1}'),
    ("cut", b'{"schema": 1, "a": "'),
)
_VALUES = ("-1", "0", "1.5", "nan", "inf", DIGITS, "true", '""', '"x"', "[]", "{}", "1979-05-27")
_SPACE = (*_BASES["search"], "--space", "hostile-space.toml")
_RULES = (*_BASES["search"], "--rules", "hostile-rules.toml")
_HARDWARE = ("targets", "lab", "--hardware", "hostile-lab.toml")


def _file(name: str, words: tuple[str, ...], content: str | bytes) -> Hostile:
    data = content.encode() if isinstance(content, str) else content
    return Hostile(name=name, words=words, says=(words[-1],), files={words[-1]: data})


def _valued(
    words: tuple[str, ...], text: str, keys: Sequence[str], *, possible: Sequence[tuple[str, str]]
) -> Iterator[Hostile]:
    """A good TOML text with each key, which has a line of its own, set to what it cannot be.

    Args:
      possible: keys and values that mean something.
    """
    lines = text.splitlines()
    for key in keys:
        place = next(at for at, line in enumerate(lines) if line.startswith(f"{key} = "))
        for value in _VALUES:
            if (key, value) not in possible:
                changed = [*lines[:place], f"{key} = {value}", *lines[place + 1 :], ""]
                yield _file(f"{words[-1]} {key} = {value[:12]}", words, "\n".join(changed))


def files() -> Iterator[Hostile]:
    """Files that are not what they should be at all."""
    for words in (_SPACE, _RULES, _HARDWARE):
        for name, content in _ANY:
            yield _file(f"{words[-1]} {name}", words, content)
    for words in (
        (*_BASES["search"], "--rules", "hostile-rules.json"),
        (*_BASES["calibrate"], "--out", "hostile-profile.json"),
    ):
        for name, content in _JSON:
            yield _file(f"{words[-1]} {name}", words, content)


def values() -> Iterator[Hostile]:
    """Files that are well-formed, with a value that means nothing."""
    keys: tuple[str, ...] = ("nodes", "devices_per_node", "network_bytes_per_s", "chip")
    yield from _valued(_HARDWARE, CLUSTER, keys, possible=[("network_bytes_per_s", "1.5")])
    for value in ("[]", "[0]", "[4, 4, -8]", f"[{DIGITS}]", "[1, 2, 3, 4, 5]", "[4.0, 4, 8]", "4"):
        text = TORUS.replace("[4, 4, 8]", value)
        yield _file(f"lab torus = {value[:12]}", _HARDWARE, text)
    mean_something = [
        *(("match", value) for value in ('""', '"x"', "1979-05-27")),
        *(("batch_axes", "[]"), ("ici", "{}")),
    ]
    keys = ("schema", "axes", "batch_axes", "match", "ici")
    yield from _valued(_RULES, RULES, keys, possible=mean_something)
    for pattern in ("(", "[", "a**", "(?P<", "(?<=a+)b", "*", f"a{{{DIGITS}}}", "(" * 3_000):
        text = RULES.replace('"cpu-4"', f"'{pattern}'")
        yield _file(f"rules match {pattern[:12]}", _RULES, text)
    for key in ("size", "min", "max", "dcn"):
        for value in (*_VALUES, "2"):
            if (key, value) not in (("dcn", "true"), ("size", "2"), ("min", "2"), ("max", "2")):
                text = f"[axes]\ndp = {{ {key} = {value} }}\ntp = {{}}\n"
                yield _file(f"space {key} = {value[:12]}", _SPACE, text)
    for value in _VALUES:
        yield _file(f"space axes {value[:12]}", _SPACE, f"axes = {value}\n")
        text = f"{GOOD_SPACE}[knobs]\nwidth = {value}\n"
        yield _file(f"space knob {value[:12]}", _SPACE, text)
    for number in ("9" * 4_000, str(2**63)):  # which Python reads
        for text in (
            f"[axes]\ndp = {{ max = {number} }}\n",
            f"{GOOD_SPACE}[knobs]\nwidth = [8, {number}]\n",
            f'{GOOD_SPACE}[constraints]\n"dp*tp" = {{ divides = {number} }}\n',
        ):
            yield _file(f"space {text[-20:]}", _SPACE, text)
    for name in ("d p", "1", "", "\\u001b[31m", "d\\u0000p", "\\u202e", "é-", f"{HUGE}-"):
        yield _file(f"space axis {name[:12]}", _SPACE, f'[axes]\n"{name}" = {{}}\n')


def variables() -> Iterator[Hostile]:
    """Environment variables."""

    def row(words: tuple[str, ...], name: str, text: str) -> Hostile:
        settings = {name: text, "SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "1"}
        row_name = f"${name} {ascii(text)[1:25]}"
        return Hostile(name=row_name, words=words, says=(name,), variables=settings)

    for text in SIZES:
        if "\0" not in text:  # which no variable can hold
            yield row(("doctor", "--cache"), "AUTOMESH_CACHE_LIMIT", text)
    for text in ("~nosuchuser/x", BYTE, HUGE, "loop"):
        yield row(("doctor", "--cache"), "AUTOMESH_CACHE", text)
    for name, text in (
        ("SLURM_NTASKS", "8"),
        ("SLURM_NTASKS", DIGITS),
        ("OMPI_COMM_WORLD_SIZE", "٨"),
        ("JAX_NUM_PROCESSES", "4"),
        ("JAX_COORDINATOR_ADDRESS", ESCAPES),
        ("JAX_COORDINATOR_ADDRESS", BYTE),
        ("TPU_WORKER_HOSTNAMES", "a,b,c"),
    ):
        yield row(_BASES["search"], name, text)
    absent = ("search", "train.py", "--target", "gpu-h100-8", "--dry-run")
    for text in ("x", "nan", "inf", "0", "-1", "1.5", DIGITS, "٫٥", BYTE, ESCAPES):
        yield row(absent, "XLA_PYTHON_CLIENT_MEM_FRACTION", text)


def all_rows() -> list[Hostile]:
    """Every row."""
    return [*options(), *arguments(), *files(), *values(), *variables()]
