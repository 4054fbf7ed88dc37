# SPDX-License-Identifier: Apache-2.0
"""`scripts/healing`: how long te needs until bytes flow again behind a fault of the network."""
