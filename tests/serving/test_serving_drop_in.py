# SPDX-License-Identifier: Apache-2.0
"""What SGLang does with Mooncake's engine beside the hand-over, on te instead."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import HOST, Fleet, Server, ServerOptions, wait_ready, with_secret
from cpu_serving.traffic import Answer, compare, make_requests, send_all
from cpu_serving.vision import image_url, make_vision_model

from bootstrap_server.admission.secret_file import write_secret_file

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

REQUESTS = make_requests(4, 200, seed=31)
OTHER_WEIGHTS = 1
IMAGES = 3
TIMEOUT_S = 300.0
LOG_OF_ENGINE = "mooncake.engine is te: session"


@pytest.fixture
def fleet(nursery: Nursery, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


def ask(server: Server) -> list[Answer]:
    answers = send_all(server.url, REQUESTS, concurrency=4)
    errors = [one.error for one in answers if one.error]
    assert not errors, errors[0]
    return answers


def with_drop_in(options: ServerOptions, *flags: object, drop_in: bool = True) -> ServerOptions:
    extra_env = {**options.extra_env, "SGLANG_MOONCAKE_DROP_IN": str(int(drop_in))}
    extra_args = (*options.extra_args, *map(str, flags))
    return replace(options, extra_env=extra_env, extra_args=extra_args)


def seed_of_weights(fleet: Fleet, options: ServerOptions) -> Server:
    """A server that offers its weights."""
    port = fleet.port()
    flags = (
        "--remote-instance-weight-loader-start-seed-via-transfer-engine",
        *("--engine-info-bootstrap-port", port),
    )
    server = fleet.server("single", with_drop_in(options, *flags), name="seed")
    wait_ready([server])
    return server


def with_weights_of(seed: Server, options: ServerOptions, port: int, **more: bool) -> ServerOptions:
    return with_drop_in(
        options,
        *("--load-format", "remote_instance"),
        *("--remote-instance-weight-loader-backend", "transfer_engine"),
        *("--remote-instance-weight-loader-seed-instance-ip", HOST),
        *("--remote-instance-weight-loader-seed-instance-service-port", seed.port),
        *("--engine-info-bootstrap-port", port),
        **more,
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_a_server_has_the_weights_of_another_one(
    fleet: Fleet, reference: Reference, tmp_path: Path, tp: int
) -> None:
    """The files of its own model have others."""
    secret = tmp_path / "secret"
    write_secret_file(secret)
    expected = reference.answers("llama", REQUESTS)
    options = with_secret(ServerOptions(make_model("llama"), tp=tp), secret)
    seed = seed_of_weights(fleet, options)
    other = replace(options, model=make_model("llama", tmp_path, seed=OTHER_WEIGHTS))
    second = fleet.server("single", with_weights_of(seed, other, fleet.port()), name="second")
    wait_ready([second])
    assert not compare(expected, ask(second))
    for server in (seed, second):
        assert server.process.log_text().count(LOG_OF_ENGINE) == tp
    # From which follows that the comparison can fail:
    without = with_weights_of(seed, other, fleet.port(), drop_in=False)
    third = fleet.server("single", without, name="third")
    wait_ready([third])
    assert compare(expected, ask(third))
    assert LOG_OF_ENGINE not in third.process.log_text()


def ask_of_images(server: Server) -> list[list[tuple[str, float]]]:
    """Tokens and their log probabilities, for each image."""
    return [ask_of_image(server, image_url(seed)) for seed in range(IMAGES)]


def ask_of_image(server: Server, url: str) -> list[tuple[str, float]]:
    parts = [
        {"type": "text", "text": "what moves in "},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        (choice,) = json.load(response)["choices"]
    return [(one["token"], round(one["logprob"], 2)) for one in choice["logprobs"]["content"]]


def test_what_an_encoder_computes_reaches_the_language_model(fleet: Fleet) -> None:
    flags = ("--enable-multimodal", "--mm-attention-backend", "sdpa")
    options = ServerOptions(make_vision_model(), extra_args=flags)
    whole = fleet.server("single", options, name="whole")
    mooncake = ("--encoder-transfer-backend", "mooncake")
    encoder = fleet.server(
        "single", with_drop_in(options, "--encoder-only", *mooncake), name="encoder"
    )
    urls = ("--language-only", "--encoder-urls", encoder.url)
    language = fleet.server("single", with_drop_in(options, *urls, *mooncake), name="language")
    wait_ready([whole, encoder, language])
    expected = ask_of_images(whole)
    assert len({str(one) for one in expected}) == IMAGES, "the images make no difference"
    assert ask_of_images(language) == expected
    assert LOG_OF_ENGINE in encoder.process.log_text()
    log = language.process.log_text()
    assert LOG_OF_ENGINE in log
    assert log.count("RDMA transfers completed") == IMAGES
