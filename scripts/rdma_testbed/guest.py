# SPDX-License-Identifier: Apache-2.0
"""What runs inside the kernel: file systems, network, devices, then the command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DRIVERS", "Guest", "exit_code", "write_files"]

DRIVERS = ("rxe", "siw")

# The first process. The host's root lies below, a layer in memory above it; the working directory
# is the host's own. busybox, because nothing is mounted yet and it needs no shared library.
INIT = r"""#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
B=@BUSYBOX@; T=@FILES@
$B mount -t proc p /proc; $B mount -t tmpfs t /mnt; $B mkdir /mnt/u /mnt/w /mnt/r /mnt/t
$B mount -t hostfs h /mnt/t -o $T; . /mnt/t/conf
$B mount -t overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w o /mnt/r || $B poweroff -f
R=/mnt/r
$B mount -t proc p $R/proc; $B mount -t sysfs s $R/sys; $B mount -t devtmpfs d $R/dev
$B mkdir -p $R/dev/pts $R/dev/shm $R/run
$B mount -t devpts d $R/dev/pts; $B mount -t tmpfs t $R/dev/shm; $B mount -t tmpfs t $R/run
d=$($B cat /mnt/t/cwd); $B mkdir -p "$R$d"; $B mount -t hostfs h "$R$d" -o "$d"
$B ln -sf /proc/self/fd $R/dev/fd
for i in 0:stdin 1:stdout 2:stderr; do $B ln -sf /proc/self/fd/${i%:*} $R/dev/${i#*:}; done
$B cp /mnt/t/setup /mnt/t/run.sh /mnt/t/conf $R/run/; $B mkdir -p $R/run/netns
for t in tty1 tty2; do $B stty raw -echo <$R/dev/$t; done
$B mkfifo /mnt/o /mnt/e
$B cat /mnt/o >$R/dev/tty1 & PO=$!
$B cat /mnt/e >$R/dev/tty2 & PE=$!
ulimit -l unlimited; ulimit -n 65536
$B chroot $R /bin/sh /run/setup || { echo "network setup failed"; $B poweroff -f; }
$B chroot $R /bin/sh /run/run.sh </dev/null >/mnt/o 2>/mnt/e
rc=$?
# The command's last output may still be in the two pipes.
for i in 1 2 3 4 5 6 7 8 9 10; do [ -d /proc/$PO -o -d /proc/$PE ] || break; $B sleep 0.1; done
echo $rc >/mnt/t/code; $B sync; $B poweroff -f
"""

# NIC i is veth<i>, 10.77.0.<i+1>/24, RDMA device <driver><i>; port<i> is its end at the switch br0.
SETUP = r"""#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin; . /run/conf
hostname rdma-testbed; ip link set lo up
# User-mode Linux has no NUMA files; engines look for NICs through them.
if [ ! -d /sys/devices/system/node ]; then
  mkdir -p /run/sysd && mount -t tmpfs t /run/sysd && mkdir -p /run/sysd/u/node/node0 /run/sysd/w
  for f in node0/cpulist online possible has_cpu; do echo 0 >/run/sysd/u/node/$f; done
  mount -t overlay -o lowerdir=/sys/devices/system,upperdir=/run/sysd/u,workdir=/run/sysd/w \
    o /sys/devices/system
fi
# Nor a CPU topology: Debian's lscpu aborts without one, and SGLang asks it.
if ! lscpu >/dev/null 2>&1; then
  rm -f /usr/bin/lscpu
  printf '#!/bin/sh\necho "# CPU,Core,Socket,Node"\necho 0,0,0,0\n' >/usr/bin/lscpu
  chmod 755 /usr/bin/lscpu
fi
# All NICs are this host's. Traffic between them must cross their wires, not lo: what leaves from a
# NIC's address is routed by a table of that NIC, before the table of local addresses is asked.
for k in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
  for d in all default; do echo ${k#*=} >/proc/sys/net/ipv4/conf/$d/${k%=*}; done
done
ip rule add pref 1000 lookup local; ip rule del pref 0
routes() {
  ip route replace local 10.77.0.$(($1+1)) dev veth$1 table $((100+$1))
  ip route replace 10.77.0.0/24 dev veth$1 src 10.77.0.$(($1+1)) table $((100+$1))
}
ip link add br0 type bridge; ip link set br0 mtu 9000 up
i=0; while [ $i -lt $NICS ]; do
  a=10.77.0.$((i+1))
  ip link add veth$i mtu 9000 type veth peer name port$i mtu 9000
  ip link set port$i master br0 up
  ip addr add $a/24 dev veth$i; ip link set veth$i up
  routes $i; ip rule add pref $((100+i)) from $a iif lo lookup $((100+i))
  rdma link add $DRIVER$i type $DRIVER netdev veth$i || exit 1
  i=$((i+1)); done
# The kernel's address resolution for queue pairs misses an ARP reply that comes at once, as over
# veth, and waits a second for the next: the first connections begin with known neighbours.
i=0; while [ $i -lt $NICS ]; do
  m=$(cat /sys/class/net/veth$i/address); j=0
  while [ $j -lt $NICS ]; do
    [ $j = $i ] || echo "neigh add 10.77.0.$((i+1)) lladdr $m dev veth$j nud reachable"
    j=$((j+1)); done
  i=$((i+1)); done | ip -batch -
# A link that goes down loses its routes, and gets only those of the main table back by itself.
ip monitor link 2>/dev/null </dev/null | while read -r line; do
  case $line in *": veth"*"<"*",UP"*) n=${line#*: veth}; routes ${n%%[@:]*} ;; esac
done >/dev/null 2>&1 &
for t in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  [ "$(rdma link | grep -c 'state ACTIVE')" -ge $NICS ] && exit 0; sleep 0.05; done
echo "not every link became ACTIVE:"; rdma link; exit 1
"""

# What the guest's shell sets by itself.
UNEXPORTED = ("PWD", "OLDPWD", "SHLVL", "_")


@dataclass(frozen=True)
class Guest:
    """What is asked of the testbed."""

    nics: int
    driver: str
    command: Sequence[str]
    directory: Path


def write_files(files: Path, guest: Guest, environment: Mapping[str, str], busybox: str) -> None:
    """Writes what the guest reads at its start into ``files``, which only we may read.

    ``busybox`` is the path of one that needs no shared library.
    """
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in environment.items()
        if name.isidentifier() and name not in UNEXPORTED
    )
    where, command = shlex.quote(str(guest.directory)), shlex.join(guest.command)
    texts = {
        "init": INIT.replace("@BUSYBOX@", busybox).replace("@FILES@", str(files)),
        "setup": SETUP,
        "run.sh": f"{exports}export RDMA_TESTBED=1\ncd {where} && exec {command}\n",
        "conf": f"NICS={guest.nics} DRIVER={guest.driver}\n",
        "cwd": str(guest.directory),
    }
    for name, text in texts.items():
        path = files / name
        path.write_text(text)
        path.chmod(0o700)


def exit_code(files: Path) -> int | None:
    """The command's exit code; None if the guest ended without one."""
    try:
        return int((files / "code").read_text())
    except FileNotFoundError:
        return None
