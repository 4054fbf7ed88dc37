/* SPDX-License-Identifier: Apache-2.0
 * The life of a transfer at its source, as one table: stage and happening make the next stage. */
#ifndef TE_CORE_STAGES_H
#define TE_CORE_STAGES_H

#include <stdint.h>

enum { /* stages */
    QUEUED,       /* nothing of it was sent */
    MOVING,       /* some of it was, and there is more */
    SENT,         /* all of it was; the destination has to answer */
    STOPPING,     /* given up here: nothing more is sent, but something is still under way */
    ABANDON_SENT, /* given up here, and the destination knows; it has to answer */
    REFUSED_EARLY, /* by the destination, which is to hear that nothing more comes */
    IS_LANDED,    /* the answer has come; something may still be under way here */
    IS_REFUSED,
    IS_ABANDONED,
    OVER,         /* it has its outcome */
    STAGES
};

enum { /* happenings */
    BEGINS,   /* its first frame is made */
    ALL_SENT,
    MORE,     /* some of it has to be sent again */
    GIVEN_UP, /* cancelled, or it cannot go on */
    SENDS_ABANDON, /* the destination has been told so, or need not be */
    LANDS,    /* the destination has it all */
    REFUSES,
    ABANDONS, /* the destination has forgotten it */
    HAPPENINGS
};

/* 0, QUEUED, where that cannot happen: nothing leads there. Any stage is left to OVER, by an outcome. */
static const uint8_t NEXT_STAGE[STAGES][HAPPENINGS] = {
    [QUEUED] = {[BEGINS] = MOVING},
    [MOVING] = {[ALL_SENT] = SENT, [MORE] = MOVING, [GIVEN_UP] = STOPPING,
                [REFUSES] = REFUSED_EARLY},
    [SENT] = {[MORE] = MOVING, [LANDS] = IS_LANDED, [REFUSES] = IS_REFUSED,
              [ABANDONS] = IS_ABANDONED},
    [STOPPING] = {[MORE] = STOPPING, [GIVEN_UP] = STOPPING, [SENDS_ABANDON] = ABANDON_SENT,
                  [REFUSES] = REFUSED_EARLY},
    [ABANDON_SENT] = {[REFUSES] = IS_REFUSED, [ABANDONS] = IS_ABANDONED},
    [REFUSED_EARLY] = {[MORE] = REFUSED_EARLY, [GIVEN_UP] = REFUSED_EARLY,
                       [SENDS_ABANDON] = IS_REFUSED},
};

#endif
