/* SPDX-License-Identifier: Apache-2.0
 * The life of a rail at either end of a link, as one table: state and happening make the next state.
 *
 *   source:       DOWN -> BUILDING -> PROBED -> UP <-> SUSPECT
 *                  ^ <------'           |        |        |
 *                  '---- UNSETTLED <----'--------'--------'
 *   destination:  DOWN -> UP -> DRAINING -> UNSETTLED -> DOWN
 */
#ifndef TE_TRANSPORTS_RDMA_RAILS_H
#define TE_TRANSPORTS_RDMA_RAILS_H

#include <stdint.h>

enum RailState { /* states */
    RAIL_DOWN = 1, /* no queue pair; at a source: waits for its back-off to be over */
    RAIL_BUILDING, /* Python was asked for a queue pair of this epoch */
    RAIL_PROBED,   /* it has come, and its probe is on its way: it carries nothing else yet */
    RAIL_UP,
    RAIL_SUSPECT,  /* has work that does not move: the rest of it is for other rails */
    RAIL_UNSETTLED,     /* its queue pair is gone here, and the other side has not said or asked what landed */
    RAIL_DRAINING, /* of a destination: in the error state, not all of its completions seen */
    RAIL_STATES
};

enum { /* happenings */
    IS_DUE,     /* its back-off is over */
    NOT_MADE, /* there is no queue pair, and this attempt makes none */
    IS_LATE,    /* nor has one come in time */
    IS_BUILT,   /* both sides have the queue pair that was asked for */
    ANSWERS,    /* the probe has arrived */
    IS_QUIET,   /* nothing that it was given completed for a while */
    MOVES,      /* something did */
    FAILS,      /* an error, an event of the device, word from the peer, or silence for too long */
    IS_TAKEN,   /* at a destination: the source has made it, anew where there was one */
    DRAINS,     /* at a destination: it is broken, or was lost by the source */
    IS_DRAINED, /* nothing more can land by it */
    IS_CLOSED,  /* the source knows what had landed */
    RAIL_HAPPENINGS
};

/* 0: that cannot happen, and changes nothing: late news of a queue pair that is gone already. */
static const uint8_t NEXT_RAIL[RAIL_STATES][RAIL_HAPPENINGS] = {
    [RAIL_DOWN] = {[IS_DUE] = RAIL_BUILDING, [IS_TAKEN] = RAIL_UP},
    [RAIL_BUILDING] = {[IS_BUILT] = RAIL_PROBED, [NOT_MADE] = RAIL_DOWN, [IS_LATE] = RAIL_DOWN},
    [RAIL_PROBED] = {[ANSWERS] = RAIL_UP, [FAILS] = RAIL_UNSETTLED},
    [RAIL_UP] = {[IS_QUIET] = RAIL_SUSPECT, [FAILS] = RAIL_UNSETTLED, [IS_TAKEN] = RAIL_UP,
                 [DRAINS] = RAIL_DRAINING},
    [RAIL_SUSPECT] = {[MOVES] = RAIL_UP, [FAILS] = RAIL_UNSETTLED},
    [RAIL_UNSETTLED] = {[IS_TAKEN] = RAIL_UP, [IS_CLOSED] = RAIL_DOWN},
    [RAIL_DRAINING] = {[IS_TAKEN] = RAIL_UP, [IS_DRAINED] = RAIL_UNSETTLED},
};

#endif
