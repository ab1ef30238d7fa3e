// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"strings"
)

// The format itself is told in doc.go, byte by byte.
const (
	formatVersion = 1
	segmentMagic  = "ehubjrnl"
	formatMagic   = "edgehub-journal"
	recordMagic   = 0x6a65

	headerFixed = 72 // bytes of a segment header before the name
	recordSize  = 40 // bytes of a record header
	sectorBytes = 512

	maxNameBytes  = 4 << 10
	maxMetaBytes  = 64 << 10
	maxBodyBytes  = 256 << 20
	maxBatchBytes = 1 << 30
	maxKind       = 127

	kindCommit = 0x80 // ends a batch
	kindFooter = 0x81 // ends a segment that has a successor
	kindSealed = 0x82 // ends a complete snapshot

	flagSnapshot    = 1 << 0 // part of a Rewrite
	flagAfterDamage = 1 << 1 // begun after damage that cannot be found again here

	formatFile    = "FORMAT"
	lockFile      = "LOCK"
	segmentSuffix = ".seg"
	removedSuffix = ".removed"
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian
)

// headerState says what the first bytes of a segment file are.
type headerState int

const (
	headerOK    headerState = iota
	headerBlank             // empty, short or zero: a crash right after create
	headerBad               // damaged
	headerNewer             // made by a newer version of this package
)

// A segmentHeader is the decoded start of a segment file.
type segmentHeader struct {
	flags    uint32
	salt     uint64
	number   uint32
	prev     uint32 // number of the segment before it, 0 for none
	prevEnd  uint32 // where the batches of prev end
	first    uint32 // snapshots: number of the snapshot's first segment
	replaces uint32 // snapshots: number of the last segment it takes the place of
	firstSeq uint64 // sequence number of the first record
	name     string
}

// align rounds up to the 8 bytes on which records begin.
func align(n int64) int64 { return (n + 7) &^ 7 }

func (h *segmentHeader) size() int64 { return align(headerFixed + int64(len(h.name))) }

func (h *segmentHeader) snapshot() bool { return h.flags&flagSnapshot != 0 }

func (h *segmentHeader) encode() []byte {
	b := make([]byte, h.size())
	copy(b, segmentMagic)
	le.PutUint32(b[8:], formatVersion)
	le.PutUint32(b[12:], crc32.Checksum(b[:12], castagnoli))
	le.PutUint32(b[20:], h.flags)
	le.PutUint64(b[24:], h.salt)
	le.PutUint32(b[32:], h.number)
	le.PutUint32(b[36:], h.prev)
	le.PutUint32(b[40:], h.prevEnd)
	le.PutUint32(b[44:], h.first)
	le.PutUint32(b[48:], h.replaces)
	le.PutUint64(b[56:], h.firstSeq)
	le.PutUint32(b[64:], uint32(len(h.name)))
	copy(b[headerFixed:], h.name)
	le.PutUint32(b[16:], headerCRC(b))
	return b
}

// headerCRC covers a whole segment header but its own four bytes.
func headerCRC(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:16], castagnoli), castagnoli, b[20:])
}

// decodeHeader reads a segment header from the start of a file. dir is the
// name of the directory it was found in and number the number that its file
// name says. A name is returned with headerBad too if it is beyond doubt.
func decodeHeader(b []byte, dir string, number uint32) (segmentHeader, headerState) {
	var h segmentHeader
	if blank(b[:min(len(b), 16)]) || len(b) < headerFixed {
		return h, headerBlank
	}
	prelude := string(b[:8]) == segmentMagic && crc32.Checksum(b[:12], castagnoli) == le.Uint32(b[12:])
	if prelude && le.Uint32(b[8:]) > formatVersion {
		return h, headerNewer
	}
	n := le.Uint32(b[64:])
	if n > maxNameBytes {
		return h, headerBad
	}
	end := align(headerFixed + int64(n))
	if end > int64(len(b)) {
		if hasNameIn(b[headerFixed:], dir) {
			return h, headerBad // it is all there, so the length is wrong
		}
		return h, headerBlank
	}
	if torn(b, end) {
		return h, headerBlank
	}
	h = segmentHeader{
		flags: le.Uint32(b[20:]), salt: le.Uint64(b[24:]), number: le.Uint32(b[32:]),
		prev: le.Uint32(b[36:]), prevEnd: le.Uint32(b[40:]), first: le.Uint32(b[44:]),
		replaces: le.Uint32(b[48:]), firstSeq: le.Uint64(b[56:]),
		name: string(b[headerFixed : headerFixed+n]),
	}
	if hashName(h.name) != dir {
		h.name = ""
		return h, headerBad
	}
	if !prelude || le.Uint32(b[8:]) != formatVersion || headerCRC(b[:end]) != le.Uint32(b[16:]) ||
		h.number != number || h.prev >= number || h.firstSeq == 0 {
		return h, headerBad
	}
	return h, headerOK
}

// torn reports whether the first end bytes of a file are what a power cut can
// leave of them: there are sectors that never reached the disk.
func torn(b []byte, end int64) bool {
	for at := int64(sectorBytes); at < end; at += sectorBytes {
		if blank(b[at:min(at+sectorBytes, end)]) {
			return true
		}
	}
	return false
}

// hasNameIn reports whether b starts with the name of which dir is the hash.
func hasNameIn(b []byte, dir string) bool {
	for n := 0; n <= min(len(b), maxNameBytes); n++ {
		if hashName(string(b[:n])) == dir {
			return true
		}
	}
	return false
}

func blank(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// A recordHeader precedes the body and the meta of every record. Commit,
// footer and sealed records are headers alone.
type recordHeader struct {
	kind    uint8
	seq     uint64
	scope   uint32 // commit: number of records; footer: number of the next segment
	batch   uint32 // offset of the first record of the batch
	metaLen uint32
	bodyLen uint32
	metaCRC uint32 // commit: CRC over the record headers of the batch
	bodyCRC uint32
}

// seed binds the record headers of a segment to it: a header copied to or
// left over at another place, or written into a body by somebody who wants
// it to be found, does not verify.
func (h *segmentHeader) seed() uint32 {
	var b [16]byte
	le.PutUint64(b[:], h.salt)
	le.PutUint32(b[8:], h.number)
	return crc32.Checksum(b[:], castagnoli)
}

// recordCRC starts from a value that differs for each offset of a segment, so
// that the same bytes at another offset cannot have the same checksum.
func recordCRC(seed uint32, offset int64, b []byte) uint32 {
	return crc32.Update(seed^uint32(offset), castagnoli, b[4:recordSize])
}

func (r *recordHeader) put(b []byte, seed uint32, offset int64) {
	le.PutUint16(b[4:], recordMagic)
	b[6] = r.kind
	b[7] = 0
	le.PutUint64(b[8:], r.seq)
	le.PutUint32(b[16:], r.scope)
	le.PutUint32(b[20:], r.batch)
	le.PutUint32(b[24:], r.metaLen)
	le.PutUint32(b[28:], r.bodyLen)
	le.PutUint32(b[32:], r.metaCRC)
	le.PutUint32(b[36:], r.bodyCRC)
	le.PutUint32(b, recordCRC(seed, offset, b))
}

// decodeRecord reads the record header at an offset of a segment. It is
// false for anything that was not written there, whole, by this package.
func decodeRecord(b []byte, seed uint32, offset int64) (recordHeader, bool) {
	if le.Uint16(b[4:]) != recordMagic || recordCRC(seed, offset, b) != le.Uint32(b) {
		return recordHeader{}, false
	}
	r := recordHeader{
		kind: b[6], seq: le.Uint64(b[8:]), scope: le.Uint32(b[16:]), batch: le.Uint32(b[20:]),
		metaLen: le.Uint32(b[24:]), bodyLen: le.Uint32(b[28:]),
		metaCRC: le.Uint32(b[32:]), bodyCRC: le.Uint32(b[36:]),
	}
	ok := r.kind != 0 && r.kind <= kindSealed && r.metaLen <= maxMetaBytes && r.bodyLen <= maxBodyBytes &&
		int64(r.batch) <= offset
	if r.kind > maxKind {
		ok = ok && r.metaLen == 0 && r.bodyLen == 0
	}
	return r, ok
}

// size is the number of bytes that the record takes in its segment.
func (r *recordHeader) size() int64 {
	return align(recordSize + int64(r.bodyLen) + int64(r.metaLen))
}

func hashName(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:])
}

func segmentName(number uint32) string { return fmt.Sprintf("%08d%s", number, segmentSuffix) }

// parseSegmentName is the inverse of segmentName.
func parseSegmentName(name string) (uint32, bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(digits) != 8 {
		return 0, false
	}
	var n uint32
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint32(c-'0')
	}
	return n, n > 0
}

func isLogDir(name string) bool {
	b, err := hex.DecodeString(name)
	return err == nil && len(b) == sha256.Size && strings.ToLower(name) == name
}

// formatLine is the content of the FORMAT file.
func formatLine(version int) string {
	s := fmt.Sprintf("%s %d", formatMagic, version)
	return fmt.Sprintf("%s %08x\n", s, crc32.Checksum([]byte(s), castagnoli))
}

// parseFormat returns the version of a FORMAT file, or 0 if it is damaged:
// a flipped bit there must not keep a node from starting.
func parseFormat(b []byte) int {
	var version int
	if n, err := fmt.Sscanf(string(b), formatMagic+" %d ", &version); n != 1 || err != nil {
		return 0
	}
	if string(b) != formatLine(version) {
		return 0
	}
	return version
}
