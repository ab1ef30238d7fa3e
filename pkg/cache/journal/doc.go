// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package journal keeps append-only logs on disk: what pkg/cache knows of the
// API server survives there a crash, a power cut and a damaged disk. A log is
// complete up to a batch boundary at or after the last acknowledged one, or
// the caller is told what is not; it is never silently short and never holds
// what belongs to another record.
//
// One caveat: the last batch of a log that a crash has torn and one that the
// disk has damaged look the same. Both end the log at the batch before it.
//
// # Files
//
//	DIR/FORMAT              edgehub-journal 1 CRC\n, CRC of what precedes it in hex
//	DIR/LOCK                locked with flock(2) by the process that uses DIR
//	DIR/HASH/NUMBER.seg     a segment
//	DIR/HASH.N.removed/     a log that was removed while it was still read
//
// HASH is the SHA-256 of the log's name in lower-case hex, NUMBER has eight
// decimal digits and starts at 1. A number is used once in the life of a log,
// also if nothing came of the segment. Directories have mode 0700, files 0600.
// All integers are little endian; CRC is CRC-32C (Castagnoli).
//
// # Segment
//
// A segment is a header and then batches. Header and records begin at
// multiples of 8 bytes and are padded with zeros.
//
//	offset size
//	     0    8 magic "ehubjrnl"
//	     8    4 format version, 1
//	    12    4 CRC of bytes 0 to 11; these 16 bytes are the same in all versions
//	    16    4 CRC of bytes 0 to 15 and 20 to the end of the padded header
//	    20    4 flags: 1 part of a snapshot, 2 begun after damage
//	    24    8 salt: random
//	    32    4 number of this segment
//	    36    4 number of the segment before it, 0 for none
//	    40    4 where the batches of that segment end
//	    44    4 snapshot: number of its first segment, else 0
//	    48    4 snapshot: number of the last segment that it replaces, else 0
//	    52    4 zero
//	    56    8 sequence number of the first record
//	    64    4 length of the name, at most 4096
//	    68    4 zero
//	    72      name of the log, padded
//
// # Record
//
//	offset size
//	     0    4 CRC of bytes 4 to 39, beginning with (seed XOR offset of the record)
//	     4    2 magic 0x6a65
//	     6    1 kind: 1-127 entry, 0x80 commit, 0x81 footer, 0x82 sealed
//	     7    1 zero
//	     8    8 sequence number
//	    16    4 entry: scope; commit: number of entries; footer: number of the next segment
//	    20    4 offset at which the batch of this record begins
//	    24    4 length of the meta, at most 64 KiB
//	    28    4 length of the body, at most 256 MiB
//	    32    4 entry: CRC of the meta; commit: CRC of the 40 bytes of each entry of the batch
//	    36    4 CRC of the body
//	    40      body, meta, padding
//
// The seed is the CRC of 16 bytes: salt, number of the segment, zero. So a
// header is valid only where it was written: not in another segment, not at
// another offset, and not inside a body whose author wants it to be found.
// Entries are numbered through the whole log. A batch is one or more entries
// and a commit record, which repeats the last entry's number. Footer and
// sealed records are batches of their own, 40 bytes, with the number of the
// last entry before them; neither meta nor body.
//
// There are no blocks. A record whose header is damaged has no length that
// can be trusted, and what follows is found by looking at each 8th byte for a
// header that is valid there and begins a batch. This loses a record and its
// batch, where 32 KiB blocks would lose up to a block, and needs no fragments:
// a body is contiguous, and a Ref is read with one pread, header first.
//
// # How segments follow each other
//
// Each segment names the one before it and where that one ends. So a batch
// that failed half-way and could not be cut off, or a file that could not be
// unlinked, is not part of the log as soon as there is a newer segment that
// does not mention it. The segment with the highest number that is not part
// of an incomplete snapshot is the last one; the log is what it leads back to.
//
// When a new segment with its first batch is durable, a footer is put at the
// end of the one before. From then on the new one is missed if it is damaged,
// empty or gone. A segment without a footer before another one is not damaged
// if it holds what the header of that other one says.
//
// Rewrite writes a snapshot: segments with flag 1, of which the first has none
// before it. When all are durable, with their directory entries, a sealed
// record is put at the end of the last one and made durable. Now, and not
// before, the snapshot is the log; older segments are unlinked. Since a
// snapshot always replaces a segment (an empty one is made if need be), one
// that is not sealed was interrupted if that segment is there, and is damaged
// if it is not.
//
// # What is damage
//
// A batch is durable before the next one is written. So a batch that is not
// whole is a torn write if nothing that was written after it can be found,
// whatever part of it reached the disk; the log ends before it. Otherwise it
// is damage: of the scope if only the body or meta of a record with a valid
// header differ, and then none of the batch's entries of this scope are handed
// over; else of all scopes. What cannot be read is damage as well. After damage
// the log goes on in a new segment, and it is reported at each replay until a
// Rewrite. If its place cannot be found again, flag 2 of the segment that was
// begun after it says so.
//
// What nobody can see: the last segment cut off after its first batch, or
// anywhere if it is the only one; and damage to the very last batch.
//
// # What happens after errors
//
// A write that fails is cut off again. After a failed fdatasync Linux takes
// for clean what it has not written, including the page that the batch shares
// with acknowledged ones. So the segment is verified, its last 64 KiB are
// written once more and synced, and it gets no further batches. If cutting off
// does not work, a new segment is begun at once, or with the next Append, or
// with Close. Only if the process dies before any of that works, replay may
// find a batch for which Append had returned an error. It is whole then.
//
// # Files kept open
//
// A node has hundreds of logs, so none holds a file: Append opens its segment
// and closes it again, which is nothing beside an fdatasync, and reading goes
// through one bounded cache of files. That works because a segment that is
// not needed any more keeps its name until the last View that may read it is
// closed. The space is the same as with unlinked files held open.
package journal
