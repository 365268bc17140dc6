"""The store URI: what it takes, what wins over what, and that everything it refuses is refused by name with a way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from adacheck.backends.errors import Unavailable
from adacheck.backends.registry import open_backend
from adacheck.backends.retry import Retry
from adacheck.backends.wrappers import Limited, Retrying
from adacheck.config import OPTIONS, StoreConfig, parse
from adacheck.errors import ConfigError
from adacheck.store import Store
from tests.faults import Fault, Faulty, at_calls

S3 = "s3://bucket/run-42?nvme=/mnt/nvme0"


def config(uri: str, environment: dict[str, str] | None = None, /, **options: Any) -> StoreConfig:
    return parse(uri, options, environment or {})


def test_defaults_of_a_file_store() -> None:
    found = config("file:///data/run-42")
    assert found == StoreConfig("file:///data/run-42", "/data/run-42/nvme")
    assert found.scheme == "file"
    assert (found.full_every, found.refresh, found.log_steps, found.keep, found.on_error) == (1000, 100, 32, 3, "warn")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("/data/run-42", "has no scheme; write file:///path"),
        ("run-42", "has no scheme"),
        ("s4://bucket/run", "unknown scheme 's4' in 's4://bucket/run' (did you mean 's3'?)"),
        ("fil:///data", "did you mean 'file'?"),
        ("gopher://x/y", "known: file, memory, s3"),
        ("file://data/run", "three slashes"),
        ("file:///", "three slashes"),
        ("s3://bucket/run", "needs nvme=DIR"),
        ("memory://run", "needs nvme=DIR"),
        ("file:///d?keeep=3", "unknown option 'keeep' in the URI (did you mean 'keep'?)"),
        ("file:///d?full-every=3", "did you mean 'full_every'?"),
        (
            "file:///d?zzz=3",
            "unknown option 'zzz' in the URI; options: nvme, full_every, refresh, log_steps, verify, keep, compress, bandwidth",
        ),
        ("file:///d?auto_mkdir=1", "unknown option 'auto_mkdir'"),
        ("file:///d?keep=3&keep=4", "has the option 'keep' twice"),
        (f"{S3}&endpoint=http://x", "did you mean 'endpoint_url'?"),
        (f"{S3}&foo=10", "unknown option 'foo' in the URI; options: nvme, full_every"),
        (f"{S3}&foo=10", "; of s3: anon, client_kwargs, config_kwargs, endpoint_url, key, secret, token, use_ssl, part_bytes, profile"),
        (f"{S3}&foo=10", ", request_timeout_s, and s3fs's own"),
        ("file:///d?keep=0", "keep=0 is too small; the least is 1"),
        ("file:///d?log_steps=1", "log_steps=1 is too small; the least is 2"),
        ("file:///d?refresh=-1", "refresh=-1 is too small"),
        ("file:///d?full_every=often", "full_every='often' is not a whole number"),
        ("file:///d?full_every=", "full_every='' is not a whole number"),
        ("file:///d?verify=never", "verify='never' is not one of rolling, step"),
        ("file:///d?on_error=ignore", "on_error='ignore' is not one of warn, raise"),
        ("file:///d?redundancy=none", "is not one of stripe, live"),
        ("file:///d?deadline_s=0", "deadline_s='0' is not a positive number of seconds"),
        ("file:///d?deadline_s=nan", "is not a positive number"),
        ("file:///d?bandwidth=fast", "bandwidth='fast' is not an amount of bytes; write 500M"),
        ("file:///d?memory_budget=0", "memory_budget='0' is not an amount"),
        ("file:///d?compress=zstd:30", "compress='zstd:30' is neither none nor one of zstd:1 to zstd:19"),
        ("file:///d?compress=zstd1", "compress='zstd1' is neither none nor one of zstd:1 to zstd:19"),
        ("file:///d?agent=host:1", "runs the keeper in process"),
        (f"{S3}&client_kwargs={{region", "client_kwargs='{region' begins like JSON and is none"),
        (f"{S3}&part_bytes=big", "part_bytes='big' is not an amount"),
        ("file:///d/run&full_every=5&nvme=none", "'file:///d/run' is followed by the option 'full_every' without a '?'"),
        ("file:///d/run&full_every=5", "write file:///d/run?full_every=…, and '&' between options"),
        ("file:///d/run#keep=3?nvme=none", "followed by the option 'keep'"),
        ("s3://bucket/run&nvme=/d", "'s3://bucket/run' is followed by the option 'nvme'"),
        ("s3://bucket/run&key=hidden&nvme=/d", "'s3://bucket/run' is followed by the option 'key'"),
        ("file:///d/r\tun", "'file:///d/r\\tun' has the control character '\\t', which would be left out; take it away"),
        ("file:///d/run\n", "control character '\\n'"),
        (f"{S3}\r\n", "control character '\\r'"),
        (
            f"{S3}&endpoint_url=localhost:8333",
            "endpoint_url='localhost:8333' is no address of a server; write endpoint_url=http://localhost:8333",
        ),
        (f"{S3}&endpoint_url=minio", "endpoint_url='minio' is no address of a server; write endpoint_url=http://minio"),
        (f"{S3}&endpoint_url=", "endpoint_url='' is no address of a server; write endpoint_url=http://host:port"),
        (f"{S3}&endpoint_url=http://", "endpoint_url='http://' is no address"),
        (f"{S3}&endpoint_url=ftp://host", "endpoint_url='ftp://host' is no address"),
        (f"{S3}&endpoint_url=http://host:99999", "endpoint_url='http://host:99999' is no address"),
        (f"{S3}&endpoint_url=http://[::1", "endpoint_url='http://[::1' is no address"),
    ],
)
def test_what_is_refused_and_why(uri: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        config(uri)


def test_a_path_may_look_a_little_like_options() -> None:
    for path in ("/d/refresh=10/run", "/d/a&b", "/d/a&b=3", "/d/lr=0.1,wd=0"):
        assert config(f"file://{path}?keep=2").address == f"file://{path}"


def test_keywords_are_refused_alike() -> None:
    with pytest.raises(ConfigError, match=re.escape("unknown option 'keeep' given to Store.open (did you mean 'keep'?)")):
        config("file:///d", keeep=3)
    for name, value in (("deadline_s", []), ("keep", True), ("keep", 2.5), ("bandwidth", {}), ("verify", 1)):
        with pytest.raises(ConfigError, match=name):
            config("file:///d", **{name: value})


def test_keywords_win_over_the_uri_and_that_over_the_environment() -> None:
    environment = {"ADACHECK_KEEP": "7", "ADACHECK_REFRESH": "17", "ADACHECK_LOG_STEPS": "27", "ADACHECK_NVME": "/env", "OTHER": "x"}
    found = config("file:///d?keep=8&refresh=18", environment, keep=9)
    assert (found.keep, found.refresh, found.log_steps, found.nvme) == (9, 18, 27, "/env")
    assert config("file:///d?nvme=/uri", environment).nvme == "/uri"
    assert config("file:///d?nvme=/uri", environment, nvme="/keyword").nvme == "/keyword"
    assert config("file:///d?keep=8", environment, keep=None).keep == 8, "a keyword of None is one that was not given"


@pytest.mark.parametrize(("variable", "near"), [("FULL_EVRY", "FULL_EVERY"), ("KEEPS", "KEEP"), ("NVME_DIR", "NVME"), ("keep", "KEEP")])
def test_a_misspelled_variable_is_refused(variable: str, near: str) -> None:
    says = f"unknown variable ADACHECK_{variable} in the environment (did you mean 'ADACHECK_{near}'?)"
    with pytest.raises(ConfigError, match=re.escape(says)):
        config("file:///d", {f"ADACHECK_{variable}": "7"}, keep=8)


@pytest.mark.parametrize(
    ("name", "text", "given", "says"),
    [
        ("FULL_EVERY", "abc", "7", "full_every='abc' is not a whole number"),
        ("VERIFY", "never", "step", "verify='never' is not one of rolling, step"),
        ("BANDWIDTH", "", "1M", "bandwidth='' is not an amount"),
        ("NVME", "log", "/n", "nvme=log is relative"),
    ],
)
def test_a_bad_value_in_the_environment_says_that_it_is_there(name: str, text: str, given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as error:
        config("file:///d", {f"ADACHECK_{name}": text})
    assert str(error.value).endswith(f" (it comes from the environment variable ADACHECK_{name})")
    config("file:///d", {f"ADACHECK_{name}": text}, **{name.lower(): given})  # it is not used


def test_a_variable_of_somebody_elses_is_left_alone() -> None:
    assert config("file:///d", {"ADACHECK_URI": "file:///d", "ADACHECK_TEST_BUCKET": "x", "ADACHECKS_KEEP": "3"}).keep == 3


def test_every_option_can_come_from_each_of_the_three() -> None:
    values = {
        "nvme": "/n", "agent": "inprocess", "peer_copies": "2", "redundancy": "live", "tolerance": "2", "full_every": "5", "refresh": "6",
        "log_steps": "7", "verify": "step", "keep": "8", "compress": "none", "bandwidth": "1M", "on_error": "raise",
        "memory_budget": "2M", "deadline_s": "9", "aside": "2",
    }  # fmt: skip
    assert values.keys() == set(OPTIONS)
    by_keyword = config("file:///d", **values)
    by_uri = config("file:///d?" + "&".join(f"{name}={value}" for name, value in values.items()))
    by_environment = config("file:///d", {f"ADACHECK_{name.upper()}": value for name, value in values.items()})
    assert by_keyword == by_uri == by_environment
    assert by_uri.bandwidth_bytes_per_s == 10**6 and by_uri.deadline_s == 9.0 and by_uri.verify == "step"


@pytest.mark.parametrize(
    ("text", "amount"),
    [("500", 500), ("500M", 500_000_000), ("2GiB", 2 << 30), ("1.5k", 1500), ("1 Ki", 1024), ("3TB", 3 * 10**12), ("4MB/s", 4_000_000)],
)
def test_amounts_have_units(text: str, amount: int) -> None:
    assert config("file:///d", bandwidth=text).bandwidth_bytes_per_s == amount
    assert config("file:///d", memory_budget=text).memory_budget_bytes == amount


def test_nvme_none_and_nvme_paths() -> None:
    assert config("s3://b/r?nvme=none").nvme is None
    assert config("s3://b/r", nvme=None).nvme is None
    assert config("file:///d?nvme=none").nvme is None
    assert config("s3://b/r", nvme=Path("/mnt/x")).nvme == "/mnt/x"
    with pytest.raises(ConfigError, match="nvme=relative/dir is relative"):
        config("s3://b/r?nvme=relative/dir")
    assert config("s3://b/r?nvme=~/log").nvme == str(Path.home() / "log")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("endpoint_url", 8333, "endpoint_url=8333 is no address"),
        ("part_bytes", "x", "part_bytes='x' is not an amount"),
        ("request_timeout_s", -1, "request_timeout_s=-1 is not a positive number"),
    ],
)
def test_keywords_of_the_object_tier_are_checked_too(name: str, value: object, wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(S3, **{name: value})
    assert wanted in str(error.value)


def test_addresses_keep_what_belongs_to_them() -> None:
    assert config("file:///data/run#2").address == "file:///data/run#2"
    assert config("file:///data/run/").address == "file:///data/run"
    assert config(f"{S3}&keep=2").address == "s3://bucket/run-42"
    assert config("memory://run?nvme=none").address == "memory://run"


def test_options_of_the_object_tier_are_passed_on_as_what_they_say() -> None:
    found = config(
        f"{S3}&use_ssl=false&anon=True&key=123&secret=true&token={{x&default_block_size=8388608&part_bytes=16MiB&profile=prod"
        '&endpoint_url=http://host:9000&client_kwargs={"region_name":"eu-1","verify":false}'
    )
    assert dict(found.storage) == {
        "use_ssl": False,
        "anon": True,
        "key": "123",
        "secret": "true",
        "token": "{x",
        "default_block_size": 8 << 20,
        "part_bytes": 16 << 20,
        "profile": "prod",
        "endpoint_url": "http://host:9000",
        "client_kwargs": {"region_name": "eu-1", "verify": False},
    }
    assert config(S3, use_ssl="false", client_kwargs={"verify": False}).storage == {"use_ssl": "false", "client_kwargs": {"verify": False}}


def test_the_options_reach_the_filesystem() -> None:
    """Up to where nobody listens: an option that the filesystem does not know, or of another type, would be told before."""
    found = config(
        f'{S3}&use_ssl=false&anon=true&part_bytes=16MiB&endpoint_url=http://127.0.0.1:1&config_kwargs={{"connect_timeout":1,"retries":{{"max_attempts":0}}}}'
    )
    with pytest.raises(Unavailable, match="bucket/run-42"):
        open_backend("s3", "bucket/run-42", found.storage)


def test_passwords_are_in_no_message_and_no_repr() -> None:
    for uri in ("s5://bucket/run?secret=hunter2", "s3://bucket/run?secret=hunter2", f"{S3}&secret=hunter2&keeep=1"):
        with pytest.raises(ConfigError) as error:
            config(uri)
        assert "hunter2" not in str(error.value)
    assert "hunter2" not in repr(config(f"{S3}&secret=hunter2"))


def test_a_limited_object_tier_is_still_tried_again(tmp_path: Path) -> None:
    """The limit hands parts on through a generator, which can be taken only once: it belongs inside of the retries."""
    store = Store.open(f"file://{tmp_path}/run", bandwidth="100M")
    assert isinstance(store.objects, Retrying) and isinstance(store.objects._backend, Limited)
    store.objects._backend._backend = Faulty(store.objects._backend._backend, at_calls({1: Fault(Unavailable("once"))}))
    store.objects._retry = Retry(sleep=lambda seconds: None)
    store.objects.put("a", b"content")
    assert store.objects.get("a") == b"content"
    store.close()
