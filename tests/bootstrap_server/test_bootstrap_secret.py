# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import stat

import pytest

from bootstrap_server.admission.secret import Keys, hkdf, new_secret, split_secrets
from bootstrap_server.admission.secret_file import read_secret_file, write_secret_file

OLD, NEW = "6f1d0c8a92e47b35b7e2f90a4c81d356", "c03be5a71f8d24969d47e2a0f5b8136c"


@pytest.mark.parametrize(
    ("secret", "salt", "label", "expected"),
    [
        pytest.param(
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
            id="A.1",
        ),
        pytest.param(
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c6"
            "5e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
            id="A.2",
        ),
        pytest.param(
            b"\x0b" * 22,
            b"",
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
            id="A.3",
        ),
    ],
)
def test_hkdf_is_that_of_rfc_5869(secret, salt, label, expected):
    assert hkdf(secret, salt, label, len(expected) // 2).hex() == expected


@pytest.mark.parametrize("length", [0, -1, 255 * 32 + 1])
def test_hkdf_refuses_a_length_that_it_cannot_make(length):
    with pytest.raises(ValueError, match="cannot make"):
        hkdf(b"secret", b"", b"", length)


def test_each_secret_and_each_channel_has_keys_of_its_own():
    keys = Keys.from_secrets([OLD.encode(), NEW.encode()])
    channels = (keys.registry, keys.record, keys.control, keys.data)
    assert [len(channel) for channel in channels] == [2] * 4
    flat = [key for channel in channels for key in channel]
    assert len(set(flat)) == 8
    assert {len(key) for key in flat} == {32}
    assert OLD.encode() not in flat


def test_keys_are_in_the_order_of_the_secrets_and_the_same_everywhere():
    both, old = Keys.from_secrets([OLD.encode(), NEW.encode()]), Keys.from_secrets([OLD.encode()])
    assert both.data[0] == old.data[0]
    # Fixed, so that releases understand each other while a deployment changes from one to the next.
    assert old.data[0].hex() == "4e447595584d9e62e14ec1462248dcf55b7db1a7284531b4026b6d851fc0e207"


def test_without_a_secret_there_are_no_keys():
    assert not Keys()
    assert Keys.from_secrets([]) == Keys()
    assert Keys.from_secrets([OLD.encode()])


def test_nothing_of_the_keys_is_shown():
    keys = Keys.from_secrets([OLD.encode()])
    assert repr(keys) == "Keys()"
    with pytest.raises(AttributeError):
        keys.data = ()


def test_secrets_stand_one_a_line():
    assert split_secrets(f"\n {OLD}\r\n\n{NEW}") == [OLD.encode(), NEW.encode()]


def test_a_new_secret_is_taken():
    made = new_secret()
    assert split_secrets(made) == [made.encode()]
    assert made != new_secret()
    assert len(made) == 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no secret in it"),
        (" \n\n", "no secret in it"),
        ("passwordpassword1", "the secret has 17 characters, at least 32"),
        ("correct-horse-battery-" * 2, "the same 8 characters twice"),
        ("0" * 64, "fewer than 8 different characters"),
        ("x" + "y1z2" * 400, "more than 1024"),
        (f"{OLD}\nshort", "the secret on line 2 has 5 characters"),
        (f"{OLD}\n{OLD}", "stands there twice"),
        (f"{OLD} {NEW}", "without spaces"),
        ("ünlucky0123456789", "printable ASCII"),
        (OLD + "\x00", "printable ASCII"),
        ("\n".join(new_secret() for _ in range(5)), "5 secrets, at most 4"),
    ],
)
def test_what_is_no_secret_is_refused_and_not_shown(text, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        split_secrets(text)
    assert not any(line and line in str(refusal.value) for line in text.split())


def test_a_file_is_made_for_its_owner_alone_and_read(tmp_path):
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        write_secret_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret_file(path) == [path.read_bytes().strip()]


def test_a_file_that_exists_stays(tmp_path):
    path = tmp_path / "secret"
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        write_secret_file(path)
    assert path.read_text() == "mine"


def test_a_file_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(ValueError, match="absent/secret: No such file"):
        write_secret_file(tmp_path / "absent" / "secret")


def with_mode(path, mode, text=OLD):
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o601, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=rf"mode {mode:04o}\): chmod 600"):
        read_secret_file(with_mode(tmp_path / "secret", mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_file_that_owner_and_group_can_read_is_taken(tmp_path, mode):
    assert read_secret_file(with_mode(tmp_path / "secret", mode)) == [OLD.encode()]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "no secret"), (b"\xff" * 32, "printable ASCII"), (b"x" * 20_000, "more than 16384")],
)
def test_a_file_without_a_secret_is_refused_by_name(tmp_path, content, sentence):
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=f"{path}.*{sentence}"):
        read_secret_file(path)


def test_a_file_that_is_absent_or_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_secret_file(tmp_path / "absent")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ValueError, match=r"no regular file|Is a directory"):
            read_secret_file(path)
