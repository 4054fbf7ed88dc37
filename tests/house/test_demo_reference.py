# SPDX-License-Identifier: Apache-2.0
"""scripts/demo --reference: the answers that were kept, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_serving.processes import ServingError
from cpu_serving.reference import read_reference, write_reference
from cpu_serving.traffic import Answer, make_requests


def test_answers_come_back_as_they_were_written(tmp_path: Path) -> None:
    requests = make_requests(3, 50)
    answers = [Answer((i, i + 1), None, 0.5) for i in range(3)]
    write_reference(tmp_path / "file", "llama", requests, answers, 1.5)
    read, elapsed_s = read_reference(tmp_path / "file", "llama", requests)
    assert [answer.output_ids for answer in read] == [(0, 1), (1, 2), (2, 3)]
    assert elapsed_s == 1.5


def test_answers_to_other_requests_are_refused(tmp_path: Path) -> None:
    requests = make_requests(3, 50)
    write_reference(tmp_path / "file", "llama", requests, [Answer((), None, 0.0)] * 3, 1.5)
    for model, others in (
        ("qwen3", requests),
        ("llama", make_requests(3, 50, seed=1)),
        ("llama", make_requests(3, 50, new_tokens=9)),
        ("llama", requests[:2]),
    ):
        with pytest.raises(ServingError, match="answers other requests; write it with"):
            read_reference(tmp_path / "file", model, others)


def test_a_request_that_failed_is_kept_in_no_file(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="failed 1 requests: no memory"):
        write_reference(
            tmp_path / "file", "m", make_requests(1, 5), [Answer((), "no memory", 0)], 0
        )
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("text", [None, "", "{}", '{"key": 1}'])
def test_what_is_no_such_file_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(ServingError, match="file cannot be read"):
        read_reference(tmp_path / "file", "llama", make_requests(3, 50))
