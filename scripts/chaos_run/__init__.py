# SPDX-License-Identifier: Apache-2.0
"""`scripts/chaos`: real servers, traffic with known answers, and a seeded schedule of faults."""
