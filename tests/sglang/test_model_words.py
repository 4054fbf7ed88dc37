# SPDX-License-Identifier: Apache-2.0
"""By what two models are told apart whose caches have one shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is said of a model with these architectures and this configuration."""
    from sglang_mooncake.sglang import seam

    def of(architectures: list[str] | None, **text: Any) -> str:
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=architectures),
            hf_text_config=SimpleNamespace(**text),
        )
        fake = SimpleNamespace(from_server_args=lambda _: config)
        monkeypatch.setattr(seam, "ModelConfig", fake)
        return seam._model(None)

    return of


SIZES = {"num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128_256}


def test_copies_of_a_model_are_alike_however_their_weights_are_stored(words: Any) -> None:
    said = words(["LlamaForCausalLM"], **SIZES)
    assert said == "LlamaForCausalLM (32 layers of 4096, 128256 tokens)"
    assert words(["LlamaForCausalLM"], **SIZES, quantization_config={"bits": 4}) == said


def test_other_models_differ(words: Any) -> None:
    said = {words(["LlamaForCausalLM"], **SIZES), words(["Qwen3ForCausalLM"], **SIZES)}
    said |= {words(["LlamaForCausalLM"], **{**SIZES, name: 7}) for name in SIZES}
    assert len(said) == 5


def test_what_a_configuration_lacks_or_says_otherwise_is_no_error(words: Any) -> None:
    assert words(None) == "a model without a name (? layers of ?, ? tokens)"
    assert len(words(["x\n" * 1_000])) <= 200
