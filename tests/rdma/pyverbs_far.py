# SPDX-License-Identifier: Apache-2.0
"""A queue pair of Debian's pyverbs, driven by lines of JSON; runs under Debian's own Python.

It shares no code with the project: what it understands of the wire and of verbs is its own.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import time
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

PORT = 1
DEPTH = 512
WAIT_S = 50.0
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class Far:
    """Each method is an operation."""

    def open(self, device: str, gid_index: int, nbytes: int, seed: int | None) -> list[Any]:
        """Number of the queue pair, GID in hexadecimal, address and key of the memory: random bytes
        of the seed, or zeros."""
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 2 * DEPTH)
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        attr = QPAttr(port_num=PORT)
        attr.qp_access_flags = ACCESS
        self.qp = QP(self.pd, init, attr)
        self.memory = MR(self.pd, nbytes, ACCESS)
        # pyverbs makes no work request without memory, also where nothing is moved.
        self.nothing = SGE(self.memory.buf, 0, self.memory.lkey)
        data = bytes(nbytes) if seed is None else random.Random(seed).randbytes(nbytes)
        self.memory.write(data, nbytes)
        self.gid_index = gid_index
        gid = self.context.query_gid(PORT, gid_index).gid
        return [self.qp.qp_num, gid.replace(":", ""), self.memory.buf, self.memory.rkey]

    def connect(self, number: int, psn: int, near_psn: int, gid: str, mtu: int) -> None:
        """With room for marks, to the ready-to-send state."""
        for i in range(DEPTH):
            self.qp.post_recv(RecvWR(wr_id=i, num_sge=1, sg=[self.nothing]))
        raw = bytes.fromhex(gid)
        text = ":".join(raw[i : i + 2].hex() for i in range(0, 16, 2))
        route = GlobalRoute(dgid=GID(text), sgid_index=self.gid_index, hop_limit=64)
        attr = QPAttr(port_num=PORT)
        attr.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        attr.path_mtu = mtu
        attr.dest_qp_num = number
        attr.rq_psn, attr.sq_psn = psn, near_psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout = 12, 14
        attr.retry_cnt = attr.rnr_retry = 5
        self.qp.to_rts(attr)

    def write(self, address: int, rkey: int, nbytes: int) -> None:
        """The first bytes of the memory, as one write; returns when it is complete."""
        sge = SGE(self.memory.buf, nbytes, self.memory.lkey)
        wr = SendWR(wr_id=1, opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge])
        wr.set_wr_rdma(rkey, address)
        self.qp.post_send(wr)
        self._completion()

    def fetch(self, address: int, rkey: int, nbytes: int) -> None:
        """Reads into the first bytes of the memory; returns when that is complete."""
        sge = SGE(self.memory.buf, nbytes, self.memory.lkey)
        wr = SendWR(wr_id=3, opcode=e.IBV_WR_RDMA_READ, num_sge=1, sg=[sge])
        wr.set_wr_rdma(rkey, address)
        self.qp.post_send(wr)
        self._completion()

    def mark(self, word: int) -> None:
        """A write of nothing, with immediate data; the word in the order of the wire."""
        opcode = e.IBV_WR_RDMA_WRITE_WITH_IMM
        wr = SendWR(wr_id=2, opcode=opcode, num_sge=1, imm_data=word, sg=[self.nothing])
        wr.set_wr_rdma(0, 0)
        self.qp.post_send(wr)
        self._completion()

    def marks(self, count: int) -> list[int]:
        """The next so many words that came, in the order of the wire."""
        found = []
        while len(found) < count:
            found.append(self._completion().imm_data)
        return found

    def read(self, nbytes: int) -> str:
        """What the memory holds."""
        return base64.b64encode(self.memory.read(nbytes, 0)).decode()

    def _completion(self) -> Any:
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            count, found = self.cq.poll()
            if count:
                if found[0].status != e.IBV_WC_SUCCESS:
                    raise RuntimeError(f"completion status {found[0].status}")
                return found[0]
            time.sleep(0.001)
        raise TimeoutError(f"no completion within {WAIT_S} s")


def main() -> None:
    far = Far()
    for line in sys.stdin:
        op, arguments = json.loads(line)
        try:
            reply = [getattr(far, op)(**arguments), None]
        except Exception as exc:  # noqa: BLE001 - told to the near end
            reply = [None, f"{type(exc).__name__}: {exc}"]
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
