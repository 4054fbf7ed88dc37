# SPDX-License-Identifier: Apache-2.0
"""te/verbs/abi.h against the headers of Debian's libibverbs and librdmacm, by the compiler.

Each size, offset and constant: the list is read out of abi.h, so that nothing can be forgotten.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from rdma_testbed.packages import ensure_files

pytestmark = pytest.mark.testbed

ABI = Path(__file__).parents[2] / "te" / "verbs" / "abi.h"
HEADERS = {
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/usr/include/rdma/rdma_cma.h": "librdmacm-dev",
}

STRUCTS = {
    "VSge": "struct ibv_sge",
    "VSendWr": "struct ibv_send_wr",
    "VRecvWr": "struct ibv_recv_wr",
    "VWc": "struct ibv_wc",
    "VContext": "struct ibv_context",
    "VQp": "struct ibv_qp",
    "VCq": "struct ibv_cq",
    "VChannel": "struct ibv_comp_channel",
    "VMr": "struct ibv_mr",
    "VDevice": "struct ibv_device",
    "VDeviceAttr": "struct ibv_device_attr",
    "VPortAttr": "struct ibv_port_attr",
    "VQpInitAttr": "struct ibv_qp_init_attr",
    "VAh": "struct ibv_ah_attr",
    "VQpAttr": "struct ibv_qp_attr",
    "VAsyncEvent": "struct ibv_async_event",
    "VGidEntry": "struct ibv_gid_entry",
    "VCmId": "struct rdma_cm_id",
    "VCmParam": "struct rdma_conn_param",
    "VCmEvent": "struct rdma_cm_event",
}
OURS = {"Endpoint"}  # no library knows it

# Fields under another name there; None: they only fill the space up to the next one.
FIELDS = {
    "VSendWr.remote_addr": "wr.rdma.remote_addr",
    "VSendWr.rkey": "wr.rdma.rkey",
    "VSendWr.other_kinds": None,
    "VQpInitAttr.max_send_wr": "cap.max_send_wr",
    "VQpInitAttr.max_recv_wr": "cap.max_recv_wr",
    "VQpInitAttr.max_send_sge": "cap.max_send_sge",
    "VQpInitAttr.max_recv_sge": "cap.max_recv_sge",
    "VQpInitAttr.max_inline_data": "cap.max_inline_data",
    "VDevice.ops": "_ops",
    "VDeviceAttr.rest": None,
    "VDeviceAttr.padding": None,
    "VAh.dgid": "grh.dgid",
    "VAh.flow_label": "grh.flow_label",
    "VAh.sgid_index": "grh.sgid_index",
    "VAh.hop_limit": "grh.hop_limit",
    "VAh.traffic_class": "grh.traffic_class",
    "VQpAttr.ah": "ah_attr",
    "VQpAttr.alt_ah": "alt_ah_attr",
    "VGidEntry.index": "gid_index",
    "VGidEntry.port": "port_num",
    "VGidEntry.type": "gid_type",
    "VGidEntry.netdev": "ndev_ifindex",
    "VCmEvent.param": "param.conn",
    "VCmEvent.rest": None,
}

CONSTANTS = {
    "OPS_POLL_CQ": "offsetof(struct ibv_context_ops, poll_cq) / sizeof(void *)",
    "OPS_REQ_NOTIFY_CQ": "offsetof(struct ibv_context_ops, req_notify_cq) / sizeof(void *)",
    "OPS_POST_SEND": "offsetof(struct ibv_context_ops, post_send) / sizeof(void *)",
    "OPS_POST_RECV": "offsetof(struct ibv_context_ops, post_recv) / sizeof(void *)",
    "CM_PS_TCP": "RDMA_PS_TCP",
}


def struct_checks(abi: str) -> list[str]:
    """What must hold of each struct, in C."""
    found = []
    pattern = r"typedef struct \w*\s*\{(.*?)\n\} (\w+);( /\* the beginning of it \*/)?"
    for body, name, is_part in re.findall(pattern, abi, re.DOTALL):
        if name in OURS:
            continue
        theirs = STRUCTS[name]
        if not is_part:
            found.append(f"sizeof({name}) == sizeof({theirs})")
        for field in fields(body):
            far = FIELDS.get(f"{name}.{field}", field)
            if far is None:
                continue
            found.append(f"offsetof({name}, {field}) == offsetof({theirs}, {far})")
            near_size, far_size = (
                f"sizeof((({t} *)0)->{f})" for t, f in ((name, field), (theirs, far))
            )
            found.append(f"{near_size} == {far_size}")
    return found


def fields(body: str) -> list[str]:
    """Names of the members in the body of a struct."""
    plain = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    declarators = [part for line in plain.split(";") for part in line.split(",")]
    return [
        re.sub(r"\[.*\]", "", part).split()[-1].lstrip("*") for part in declarators if part.strip()
    ]


def constant_checks(abi: str) -> list[str]:
    """What must hold of each constant, in C."""
    plain = re.sub(r"/\*.*?\*/", "", abi, flags=re.DOTALL)
    bodies = re.findall(r"\benum \{(.*?)\}", plain, re.DOTALL)
    names = [one.split("=")[0].strip() for body in bodies for one in body.split(",") if one.strip()]
    return [f"{name} == {far_constant(name)}" for name in names]


def far_constant(name: str) -> str:
    if name in CONSTANTS:
        return CONSTANTS[name]
    return f"RDMA_CM_EVENT_{name[3:]}" if name.startswith("CM_") else f"IBV_{name}"


def compiled(abi: str, checks: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    (directory / "abi.h").write_text(abi)
    lines = [f'#include "abi.h"\n{"".join(f"#include <{h[13:]}>{chr(10)}" for h in HEADERS)}']
    lines += [f'_Static_assert({check}, "{check}");' for check in checks]
    source = directory / "checks.c"
    source.write_text("\n".join(lines) + "\n")
    return subprocess.run(
        ["cc", "-std=gnu11", "-fsyntax-only", "-Wno-enum-compare", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def abi() -> str:
    ensure_files(HEADERS, "comparing te/verbs/abi.h with them")
    return ABI.read_text()


def test_structs_and_constants_are_those_of_the_headers(abi: str, tmp_path: Path) -> None:
    structs, constants = struct_checks(abi), constant_checks(abi)
    assert {re.split(r"[(,)]", check)[1] for check in structs if check.startswith("offsetof")} == {
        *STRUCTS
    }
    assert "offsetof(VQpAttr, rnr_retry) == offsetof(struct ibv_qp_attr, rnr_retry)" in structs
    assert "QP_DEST_QPN == IBV_QP_DEST_QPN" in constants
    done = compiled(abi, structs + constants, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("uint32_t length, lkey;", "uint32_t lkey, length;", "offsetof(VSge, length)"),
        ("uint16_t dlid;", "uint32_t dlid;", "VAh *)0)->dlid"),
        ("int32_t status, opcode;", "int32_t status; int16_t opcode;", "opcode)"),
        ("CM_ESTABLISHED = 9", "CM_ESTABLISHED = 8", "CM_ESTABLISHED"),
        ("OPS_POST_SEND = 25", "OPS_POST_SEND = 24", "OPS_POST_SEND"),
    ],
)
def test_a_wrong_declaration_is_found(
    abi: str, tmp_path: Path, right: str, wrong: str, says: str
) -> None:
    changed = re.sub(r"_Static_assert.*\n", "", abi).replace(right, wrong)
    assert right not in changed
    done = compiled(changed, struct_checks(changed) + constant_checks(changed), tmp_path)
    assert done.returncode != 0
    assert says in done.stderr
