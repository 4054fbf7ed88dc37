# SPDX-License-Identifier: Apache-2.0
"""Who may register caches at a router that has the deployment's secret, and the command for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from router_world import World, run

from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_keys, write_secret_file
from sglang_mooncake.sglang.cli import main

TOLD = {"endpoint": "tcp://127.0.0.1:1", "instance_id": "a", "block_size": 4}


def registers(world: World, told: Any, *words: str) -> int:
    """The command's exit status."""
    return main(["register", world.url.removeprefix("http://"), json.dumps(told), *words])


def test_caches_are_registered_by_who_has_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    mine, others = tmp_path / "mine", tmp_path / "others"
    for path in (mine, others):
        write_secret_file(path)
    proved = ("--secret-file", str(mine))

    async def job() -> None:
        async with World(prefill_policy="cache_aware", keys=read_keys(mine)) as world:

            async def said(told: Any, *words: str) -> tuple[int, str]:
                status = await asyncio.to_thread(registers, world, told, *words)
                printed = capsys.readouterr()
                return status, printed.err if status else printed.out

            status, answer = await said(TOLD)
            assert (status, "does not prove it: `sglang-mooncake register" in answer) == (2, True)
            status, answer = await said(TOLD, "--secret-file", str(others))
            assert (status, "it has another secret" in answer) == (2, True)
            async with world.client.post(f"{world.url}/unregister", json=TOLD) as response:
                assert response.status == 401
            assert await said(TOLD, "--end", *proved) == (
                0,
                '{"status": "unregistered successfully", "removed_instances": []}\n',
            )
            status, answer = await said(TOLD, *proved)
            assert (status, "registered successfully" in answer) == (0, True)
            status, answer = await said({**TOLD, "block_size": 0}, *proved)
            assert (status, "block_size must be positive" in answer) == (2, True)
            # All else is open to clients, who have no secret.
            assert (await world.ask("/query", token_ids=[1]))[1] == {"default": {}}
            assert (await world.ask(text="a"))[0] == 200
            _, answer = await said(TOLD, "--end", *proved)
            assert "a|default|0" in answer

    run(job())
    assert "refused a registration from 127.0.0.1: it does not prove" in caplog.text


def test_without_a_secret_everybody_registers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret"
    write_secret_file(path)

    async def job() -> None:
        async with World(prefill_policy="cache_aware", keys=Keys()) as world:
            assert await asyncio.to_thread(registers, world, TOLD) == 0
            words = ("--secret-file", str(path))
            assert await asyncio.to_thread(registers, world, TOLD, *words) == 2
            assert "does not prove that it has our secret: it has none" in capsys.readouterr().err

    run(job())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["127.0.0.1:1", "{}"], "the router at 127.0.0.1:1 cannot be reached"),
        (["http://127.0.0.1:1", "{}"], "is not of the form host:port"),
        (["127.0.0.1:1", "{}", "--secret-file", "/no/such"], "cannot read the secret"),
    ],
)
def test_a_registration_that_cannot_be_made_is_told(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["register", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sglang-mooncake register: ")
    assert sentence in said
