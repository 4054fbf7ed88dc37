/* SPDX-License-Identifier: Apache-2.0
 * The wire format of the frames between engines, in one table: which kinds there are, who sends
 * them over which links, what each field of the header may be, and what follows the header. The
 * plane checks every header against it (`check_header`). te_bench/_wire.pyx gives it to Python: the
 * fuzzers take their values from it, and docs/wire.md is written from it. A change here is a change
 * of the protocol: see PROTOCOL_VERSION in te/handshake.py. */
#ifndef TE_CORE_WIRE_H
#define TE_CORE_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/uio.h>

enum { /* limits of the format */
    RAILS_MAX = 8,             /* of a link */
    NICS_MAX = 8,              /* RDMA devices of an engine */
    BLOCKS_MAX = 1020,         /* of a frame: one call to the kernel takes 1024 pieces of memory */
    SEGMENT_BYTES_MAX = 64 << 20,
    TRAILER_BYTES = 8,
    REASON_MAX = 511,          /* bytes */
    TEXT_MAX = REASON_MAX + 1, /* room for a reason, or for what is wrong with a frame, as a string */
    PIECES_MAX = 1 << 16,      /* of a transfer: the immediate data has 16 bits for it */
    POSTED_MAX = 64,           /* pieces under way on a rail at once */
    TABLE_MAX = 500,           /* ranges of memory in a frame */
    TABLE_RANGES_MAX = 1 << 16, /* and in all */
    BEGUN_MAX = 256,           /* transfers that a source has begun and has no answer for */
    ARRIVING_MAX = 4096,       /* transfers that a destination has begun to receive, per link */
    READS_SERVED_MAX = 256,    /* frames of reads that a side serves at once */
    RECEIVES = 256,            /* marks that a queue pair takes before its CREDIT comes */
    NOTE_PART_MAX = 16 << 10,  /* bytes of a note in a frame */
    NOTE_MAX = 1 << 20         /* and in all */
};

enum { ANY_RAIL = 255 }; /* of RAIL_BROKEN: all that there were */

enum { /* kinds of frame */
    SEGMENT = 16,
    END = 17,
    ABANDON = 18,
    ACK = 19,
    PULL = 20,
    READ = 21,
    ASK = 22,
    TABLE = 23,
    RAIL_LOST = 24,
    RAIL_CLOSED = 25,
    RAIL_BROKEN = 26,
    CREDIT = 27,
    NOTE = 28
};
#define FIRST_KIND SEGMENT
#define KINDS (NOTE - FIRST_KIND + 1)
#define VARIANTS 5 /* rules of a kind, at most */

enum { LANDED, REFUSED, ABANDONED, PROGRESS, GRANTED }; /* status of an ACK */

enum { FLAG_REPLY = 1 };  /* of a SEGMENT, PULL or ABANDON: it answers a READ */
enum { TABLE_FIRST = 1 }; /* flag of a TABLE: what was told before is void */

enum { /* what peers may do with registered memory */
    RIGHT_READ = 1,
    RIGHT_TAGGED = 2,   /* write it under a tag that is open */
    RIGHT_UNTAGGED = 4, /* write it without one */
    REMOTE_RIGHTS = 7
};

/* -- structs */

typedef struct {
    uint8_t kind, status;
    uint16_t flags;
    uint32_t count;
    uint64_t transfer, tag, nbytes, total;
} Header;

/* One contiguous copy; te.blocks.BLOCK. */
typedef struct {
    uint64_t src, dst, nbytes;
} Block;

/* Where the next nbytes bytes of a segment's payload go. */
typedef struct {
    uint64_t dst, nbytes;
} Landing;

/* What a transfer over RDMA is cut into, by its place among all of them. */
typedef struct {
    uint64_t transfer, piece;
} PieceId;

/* Registered memory of a destination, and what each of its RDMA devices calls it. */
typedef struct {
    uint64_t start, end, rights;
    uint32_t keys[NICS_MAX];
} RemoteRange;

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");
_Static_assert(sizeof(struct iovec) == sizeof(Landing), "64-bit machines only");
_Static_assert(sizeof(Header) == 40, "the header of a frame is 40 bytes");
_Static_assert(sizeof(Block) == 24 && sizeof(Landing) == 16 && sizeof(PieceId) == 16, "no padding");
_Static_assert(sizeof(RemoteRange) == 24 + 4 * NICS_MAX, "no padding");

typedef struct {
    const char *name;
    size_t offset, nbytes, length; /* length: of an array, else 1 */
    const char *means;
} Member;
#define MEMBER(type, name, length, means) \
    {#name, offsetof(type, name), sizeof(((type *)0)->name), length, means}

typedef struct {
    const char *name;
    size_t nbytes;
    Member members[8];
} Layout;

/* Of the header, then of what may follow it. */
enum { THE_HEADER, REASON_BYTE, LANDING, BLOCK, PIECE_ID, REMOTE_RANGE, NOTE_BYTE, LAYOUTS };
#define NO_ITEM THE_HEADER
static const Layout LAYOUT_TABLE[LAYOUTS] = {
    [THE_HEADER] = {"Header", sizeof(Header), {
        MEMBER(Header, kind, 1, "which frame it is"),
        MEMBER(Header, status, 1, "what an ACK says, or why a rail was broken"),
        MEMBER(Header, flags, 1, "bits"),
        MEMBER(Header, count, 1, "how many items follow"),
        MEMBER(Header, transfer, 1, "number of the transfer, or of the rail"),
        MEMBER(Header, tag, 1, "under which the transfer lands"),
        MEMBER(Header, nbytes, 1, "bytes that this frame moves"),
        MEMBER(Header, total, 1, "bytes of the whole transfer")}},
    [REASON_BYTE] = {"Reason", 1, {{"character", 0, 1, 1, "printable ASCII"}}},
    [LANDING] = {"Landing", sizeof(Landing), {
        MEMBER(Landing, dst, 1, "address at the receiver"),
        MEMBER(Landing, nbytes, 1, "at least 1; all of a frame add up to its nbytes")}},
    [BLOCK] = {"Block", sizeof(Block), {
        MEMBER(Block, src, 1, "address at the side that the bytes come from"),
        MEMBER(Block, dst, 1, "address at the side that they go to"),
        MEMBER(Block, nbytes, 1, "at least 1; all of a frame add up to its nbytes")}},
    [PIECE_ID] = {"PieceId", sizeof(PieceId), {
        MEMBER(PieceId, transfer, 1, "number of the transfer"),
        MEMBER(PieceId, piece, 1, "its place among the pieces of the transfer, from 0")}},
    [REMOTE_RANGE] = {"RemoteRange", sizeof(RemoteRange), {
        MEMBER(RemoteRange, start, 1, "address of its first byte"),
        MEMBER(RemoteRange, end, 1, "address behind its last byte; ranges rise and do not overlap"),
        MEMBER(RemoteRange, rights, 1, "what the source may do there: 1 read it, 2 write it under a tag, 4"
                               " write it without a tag; at least one of them"),
        MEMBER(RemoteRange, keys, NICS_MAX, "rkey for each RDMA device of the destination; 0 as long as the"
                                    " source has asked for nothing that the rights allow")}},
    [NOTE_BYTE] = {"NoteByte", 1, {{"byte", 0, 1, 1, "of the application's"}}},
};

/* -- rules */

enum { OVER_TCP = 1, OVER_RINGS = 2, OVER_BYTES = 3, OVER_RDMA = 4 }; /* links */

/* Fields of the header; in this order they are checked. */
enum { NO_FIELD, H_STATUS, H_FLAGS, H_COUNT, H_TRANSFER, H_TAG, H_NBYTES, H_TOTAL, H_FIELDS };

typedef struct {
    uint64_t least, most;
    const char *means; /* NULL: nothing, it is 0 */
    uint8_t floor;     /* another field, of which it is at least as much */
} Bounds;
#define BETWEEN(least, most, means) {least, most, means, NO_FIELD}
#define ANY(means) {0, UINT64_MAX, means, NO_FIELD}
#define AT_LEAST(field, least, most, means) {least, most, means, field}
#define IS(value) BETWEEN(value, value, #value)

/* A frame as one side sends it. Of a kind that has several rules, the one counts that the sender
 * may use over the link, and of these the one with the status. */
typedef struct {
    const char *name, *variant;
    uint8_t source, destination; /* links over which that side sends it */
    uint8_t item;                /* what `count` counts, if that follows the header */
    uint8_t has_payload;         /* `nbytes` bytes, then a trailer */
    Bounds bounds[H_FIELDS];     /* those left out are 0 */
    const char *says;
} FrameRule;
#define KIND(kind) [kind - FIRST_KIND]
#define FRAME(kind, variant_) .name = #kind, .variant = variant_

#define NUMBER [H_TRANSFER] = BETWEEN(1, UINT64_MAX, "number of the transfer")
#define TAGGED [H_TAG] = ANY("tag of the transfer, or 0")
#define REPLIED \
    [H_FLAGS] = IS(FLAG_REPLY), [H_TAG] = BETWEEN(1, UINT64_MAX, "number of the READ")
#define SOME_BLOCKS \
    [H_COUNT] = BETWEEN(1, BLOCKS_MAX, "blocks"), \
    [H_NBYTES] = AT_LEAST(H_COUNT, 1, SEGMENT_BYTES_MAX, "bytes of these blocks"), \
    [H_TOTAL] = AT_LEAST(H_NBYTES, 1, UINT64_MAX, "bytes of the transfer")
#define RAIL \
    [H_TRANSFER] = BETWEEN(0, RAILS_MAX - 1, "rail"), \
    [H_TAG] = BETWEEN(0, UINT32_MAX, "epoch of the rail")
#define PIECES(means) [H_COUNT] = BETWEEN(0, POSTED_MAX, means)

static const FrameRule FRAME_RULES[KINDS][VARIANTS] = {
    KIND(SEGMENT) = {
        {FRAME(SEGMENT, ""), .source = OVER_BYTES, .item = LANDING, .has_payload = 1,
         .bounds = {NUMBER, TAGGED, SOME_BLOCKS},
         .says = "A part of a transfer, with its bytes."},
        {FRAME(SEGMENT, "reply"), .destination = OVER_BYTES, .item = LANDING, .has_payload = 1,
         .bounds = {NUMBER, REPLIED, SOME_BLOCKS},
         .says = "A part of what a READ asks for, with its bytes. It is a transfer of its own, as"
                 " long as that READ's blocks."}},
    KIND(END) = {
        {FRAME(END, ""), .source = OVER_BYTES | OVER_RDMA, .bounds = {NUMBER, TAGGED},
         .says = "A whole transfer without blocks: it arrives, and counts under its tag."}},
    KIND(ABANDON) = {
        {FRAME(ABANDON, ""), .source = OVER_BYTES,
         .bounds = {NUMBER, TAGGED, [H_TOTAL] = ANY("bytes of it that were sent")},
         .says = "The source gives a transfer up, and sends no more of it."},
        {FRAME(ABANDON, "over RDMA"), .source = OVER_RDMA,
         .bounds = {NUMBER, TAGGED, [H_TOTAL] = BETWEEN(0, PIECES_MAX, "pieces that are written")},
         .says = "The source gives a transfer up that was granted, and writes no more of it."},
        {FRAME(ABANDON, "reply"), .destination = OVER_BYTES,
         .bounds = {NUMBER, REPLIED, [H_TOTAL] = ANY("bytes of it that were sent")},
         .says = "The rest of what a READ asks for does not come."}},
    KIND(ACK) = {
        {FRAME(ACK, "LANDED"), .source = OVER_BYTES, .destination = OVER_BYTES | OVER_RDMA,
         .bounds = {[H_STATUS] = IS(LANDED), NUMBER},
         .says = "All of the transfer has landed, and is counted under its tag."},
        {FRAME(ACK, "REFUSED"), .source = OVER_BYTES, .destination = OVER_BYTES | OVER_RDMA,
         .item = REASON_BYTE,
         .bounds = {[H_STATUS] = IS(REFUSED), NUMBER,
                    [H_COUNT] = BETWEEN(0, REASON_MAX, "bytes of the reason")},
         .says = "The transfer, or the READ, is refused, and says why. No more of it lands."},
        {FRAME(ACK, "ABANDONED"), .source = OVER_BYTES, .destination = OVER_BYTES | OVER_RDMA,
         .bounds = {[H_STATUS] = IS(ABANDONED), NUMBER},
         .says = "A transfer that was given up, or whose memory could not be read, has ended. It"
                 " does not count."},
        {FRAME(ACK, "PROGRESS"), .source = OVER_BYTES, .destination = OVER_BYTES,
         .bounds = {[H_STATUS] = IS(PROGRESS), NUMBER,
                    [H_NBYTES] = BETWEEN(1, UINT64_MAX, "bytes copied since the last word")},
         .says = "So much more of a transfer by PULL has been copied."},
        {FRAME(ACK, "GRANTED"), .destination = OVER_RDMA,
         .bounds = {[H_STATUS] = IS(GRANTED), NUMBER,
                    [H_TAG] = BETWEEN(0, UINT32_MAX, "mark of piece 0: slot << 24 |"
                                                     " generation << 16; 0 where count was 0")},
         .says = "The transfer that was asked for may be written, or read."}},
    KIND(PULL) = {
        {FRAME(PULL, ""), .source = OVER_RINGS, .item = BLOCK,
         .bounds = {NUMBER, TAGGED, SOME_BLOCKS},
         .says = "A part of a transfer that the receiver copies by itself."},
        {FRAME(PULL, "reply"), .destination = OVER_RINGS, .item = BLOCK,
         .bounds = {NUMBER, REPLIED, SOME_BLOCKS},
         .says = "A part of what a READ asks for, which the receiver copies by itself."}},
    KIND(READ) = {
        {FRAME(READ, ""), .source = OVER_BYTES, .item = BLOCK, .bounds = {NUMBER, SOME_BLOCKS},
         .says = "Asks for bytes of the destination: from its src to the sender's dst."}},
    KIND(ASK) = {
        {FRAME(ASK, ""), .source = OVER_RDMA,
         .bounds = {NUMBER, TAGGED, [H_COUNT] = BETWEEN(0, PIECES_MAX, "pieces; 0 of a read"),
                    [H_TOTAL] = AT_LEAST(H_COUNT, 0, UINT64_MAX, "bytes of the transfer")},
         .says = "May this transfer be written? Of a read: what memory may be read?"}},
    KIND(TABLE) = {
        {FRAME(TABLE, ""), .destination = OVER_RDMA, .item = REMOTE_RANGE,
         .bounds = {[H_FLAGS] = BETWEEN(0, TABLE_FIRST, "TABLE_FIRST, or 0: it goes on"),
                    [H_COUNT] = BETWEEN(0, TABLE_MAX, "ranges")},
         .says = "The memory in which peers may do anything, before a grant, if it has changed or the"
                 " grant needs other keys than were told."}},
    KIND(RAIL_LOST) = {
        {FRAME(RAIL_LOST, ""), .source = OVER_RDMA, .item = PIECE_ID,
         .bounds = {RAIL, PIECES("pieces that were under way")},
         .says = "The source has destroyed its end of a rail. What of these pieces has landed?"}},
    KIND(RAIL_CLOSED) = {
        {FRAME(RAIL_CLOSED, ""), .destination = OVER_RDMA, .item = PIECE_ID,
         .bounds = {RAIL, PIECES("those of them that have landed")},
         .says = "The destination has destroyed its end, too: nothing lands through it any more."}},
    KIND(RAIL_BROKEN) = {
        {FRAME(RAIL_BROKEN, ""), .destination = OVER_RDMA,
         .bounds = {[H_STATUS] = BETWEEN(0, UINT8_MAX, "why: te.transports.rdma.reasons.RailReason, or 0"),
                    [H_TRANSFER] = BETWEEN(0, ANY_RAIL, "rail; ANY_RAIL: all that there were"),
                    [H_TAG] = BETWEEN(0, UINT32_MAX, "epoch of the rail"),
                    [H_TOTAL] = ANY("how often all rails of the link were fenced")},
         .says = "The destination breaks its end of a rail. The source answers with RAIL_LOST."}},
    KIND(CREDIT) = {
        {FRAME(CREDIT, ""), .destination = OVER_RDMA,
         .bounds = {RAIL, [H_TOTAL] = ANY("marks that have come through it since it was made")},
         .says = "The destination has room for more marks on a rail."}},
    KIND(NOTE) = {
        {FRAME(NOTE, ""), .source = OVER_BYTES | OVER_RDMA, .item = NOTE_BYTE,
         .bounds = {[H_TRANSFER] = BETWEEN(1, UINT64_MAX, "number of the note; they rise"),
                    [H_COUNT] = BETWEEN(1, NOTE_PART_MAX, "bytes that follow"),
                    [H_TOTAL] = AT_LEAST(H_COUNT, 1, NOTE_MAX, "bytes of the note")},
         .says = "A part of a note, a message of the application's. The parts of one come in order,"
                 " and no part of another note between them. There is no answer."}},
};

/* -- making and checking headers */

static inline Header header_of(uint8_t kind, uint64_t transfer, uint64_t tag, uint64_t total) {
    return (Header){.kind = kind, .transfer = transfer, .tag = tag, .total = total};
}

/* What an ACK, whose header has passed, says. */
static inline const char *ack_name(const Header *h) {
    return FRAME_RULES[ACK - FIRST_KIND][h->status].variant;
}

static inline size_t item_bytes(const FrameRule *rule) {
    return rule->item == NO_ITEM ? 0 : LAYOUT_TABLE[rule->item].nbytes;
}

/* Room for what follows any header that passes there (see check_header), but for payload and trailer. */
static inline size_t body_bytes_max(int over, int from_source) {
    size_t most = 0, nbytes;
    for (int kind = 0; kind < KINDS; kind++)
        for (const FrameRule *rule = FRAME_RULES[kind]; rule < FRAME_RULES[kind + 1]; rule++) {
            nbytes = item_bytes(rule) * rule->bounds[H_COUNT].most;
            if ((from_source ? rule->source : rule->destination) & over && nbytes > most)
                most = nbytes;
        }
    return most;
}

/* The rule for a header; NULL, and a sentence in the text, if there is none. */
static inline const FrameRule *find_rule(
    const Header *h, int over, int from_source, char *text, size_t room) {
    const FrameRule *found = NULL;
    int kind = h->kind - FIRST_KIND, n = 0;
    for (int i = 0; i < VARIANTS && kind >= 0 && kind < KINDS; i++) {
        const FrameRule *rule = &FRAME_RULES[kind][i];
        if (!((from_source ? rule->source : rule->destination) & over))
            continue;
        found = rule;
        n++;
        if (rule->bounds[H_STATUS].least == h->status)
            return rule;
    }
    if (n == 0)
        snprintf(text, room, "a frame of kind %d is not expected here", h->kind);
    else if (n > 1)
        snprintf(text, room, "%s has the unknown status %d", found->name, h->status);
    return n == 1 ? found : NULL;
}

/* A sentence about the field that breaks its bounds. */
static inline void say_bounds(
    const FrameRule *rule, int field, const uint64_t *values, char *text, size_t room) {
    const Member *names = LAYOUT_TABLE[THE_HEADER].members; /* of the field: names[field] */
    const Bounds *b = &rule->bounds[field];
    int n = snprintf(text, room, "%s%s%s has %s %llu, which must be ", rule->name,
                     *rule->variant ? " " : "", rule->variant, names[field].name,
                     (unsigned long long)values[field]);
    text += n;
    room -= (size_t)n;
    if (b->least == b->most)
        snprintf(text, room, "%llu", (unsigned long long)b->least);
    else if (values[field] >= b->least && values[field] <= b->most)
        snprintf(text, room, "at least its %s, %llu", names[b->floor].name,
                 (unsigned long long)values[b->floor]);
    else if (b->most == UINT64_MAX)
        snprintf(text, room, "at least %llu", (unsigned long long)b->least);
    else
        snprintf(text, room, "between %llu and %llu", (unsigned long long)b->least,
                 (unsigned long long)b->most);
}

/* How many bytes of items follow a header that came over one link (OVER_TCP, OVER_RINGS or
 * OVER_RDMA), from the side that dialled it (the source) or from the other; or -1, and in the text
 * a sentence of what is wrong with it. */
static inline int64_t check_header(
    const Header *h, int over, int from_source, char *text, size_t room) {
    const uint64_t values[H_FIELDS] = {
        0, h->status, h->flags, h->count, h->transfer, h->tag, h->nbytes, h->total};
    const FrameRule *rule = find_rule(h, over, from_source, text, room);
    if (rule == NULL)
        return -1;
    for (int i = H_STATUS; i < H_FIELDS; i++) {
        const Bounds *b = &rule->bounds[i];
        if (values[i] < b->least || values[i] > b->most || values[i] < values[b->floor]) {
            say_bounds(rule, i, values, text, room);
            return -1;
        }
    }
    return (int64_t)(h->count * item_bytes(rule));
}

#endif
