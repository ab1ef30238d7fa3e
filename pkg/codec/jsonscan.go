// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// maxJSONDepth bounds the nesting of a value, as encoding/json does.
const maxJSONDepth = 10000

// The states of a jsonScanner. Those up to wantMember are between tokens, where
// white space may stand.
const (
	wantValue   = iota
	wantElement // after [: a value or ]
	wantKey     // after { or , in an object; see firstKey
	wantColon
	wantNext // after a value inside a container: , or the end
	inString
	inEscape
	inUnicode
	inLiteral
	numMinus // a digit must follow
	numZero
	numInt
	numPoint // a digit must follow
	numFrac
	numExp // a sign or digit must follow
	numExpSign
	numExpInt
	scanDone
)

// jsonScanner finds the end of one JSON value that may arrive in pieces, and
// checks its grammar on the way (not UTF-8, which encoding/json does not refuse
// either). The zero value is ready; it keeps no reference to the bytes.
type jsonScanner struct {
	state    uint8
	after    uint8 // state after the string that is being read
	hex      uint8 // hex digits that \u still needs
	firstKey bool  // } may stand in place of a key
	object   bool  // the innermost container is an object
	rest     string
	depth    int
	near     uint64   // kinds of the outer 64 containers, one bit each, 1 = object
	far      []uint64 // the others
	// direct counts the containers that were opened directly inside the outermost
	// one, and closed is the offset at which the last of these ended.
	direct, closed, base int
}

func (s *jsonScanner) reset() {
	*s = jsonScanner{far: s.far}
}

// scan consumes the bytes of the value. done is set when the value is complete:
// p[:n] is the rest of it. Only a number at the outermost level needs the byte
// behind it to be seen complete; use finish at the end of the input.
func (s *jsonScanner) scan(p []byte) (n int, done bool, err error) {
	i := 0
	for i < len(p) && s.state != scanDone {
		c, step := p[i], 1
		switch s.state {
		case inString:
			if i = s.run(p, i); i == len(p) || s.state != inString {
				continue
			}
			switch p[i] {
			case '"':
				s.state = s.after
			case '\\':
				s.state = inEscape
			default:
				err = s.unexpected(p[i])
			}
		case wantKey:
			switch {
			case c == '"':
				s.state, s.after = inString, wantColon
			case c == '}' && s.firstKey:
				s.pop(i)
			case !isSpace(c):
				err = s.unexpected(c)
			}
		case wantColon:
			switch {
			case c == ':':
				s.state = wantValue
			case !isSpace(c):
				err = s.unexpected(c)
			}
		case wantNext:
			switch {
			case c == ',' && s.object:
				s.state, s.firstKey = wantKey, false
			case c == ',':
				s.state = wantValue
			case c == '}' && s.object, c == ']' && !s.object:
				s.pop(i)
			case !isSpace(c):
				err = s.unexpected(c)
			}
		case wantValue, wantElement:
			err = s.begin(c, i)
		default:
			step, err = s.token(c)
		}
		if err != nil {
			return i, false, err
		}
		i += step
	}
	s.base += i
	return i, s.state == scanDone, nil
}

// run is the inner loop: it steps over the rest of a string, and over the strings
// behind it as long as nothing stands between them but one separator, which
// is what nearly all of a Kubernetes object is. It stops inside a string at a byte
// that needs a closer look or at the end of p, or behind the string's end.
func (s *jsonScanner) run(p []byte, i int) int {
	key := s.after == wantColon
	for {
		i += plainRun(p[i:])
		if len(p)-i < 3 || p[i] < 0x20 {
			break
		}
		switch c, next := p[i+1], p[i+2] == '"'; {
		case p[i] == '\\':
			if c != '"' && c != '\\' && c != 'n' {
				s.setAfter(key)
				return i
			}
			i += 2
		case key && c == ':' && next:
			i, key = i+3, false
		case key && c == ':':
			s.state = wantValue
			return i + 2
		case !key && c == ',' && next && s.depth > 0:
			i, key = i+3, s.object
		default:
			s.setAfter(key)
			s.state = s.after
			return i + 1
		}
	}
	s.setAfter(key)
	return i
}

func (s *jsonScanner) setAfter(key bool) {
	if s.after = wantColon; !key {
		s.after = s.nextState()
	}
}

// token handles everything that is rare. It returns 0 if c ended a number, of which
// it is no part, and 1 otherwise.
func (s *jsonScanner) token(c byte) (int, error) {
	switch s.state {
	case inEscape:
		switch c {
		case 'u':
			s.state, s.hex = inUnicode, 4
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			s.state = inString
		default:
			return 0, s.unexpected(c)
		}
		return 1, nil
	case inUnicode:
		if !isDigit(c) && (c|0x20 < 'a' || c|0x20 > 'f') {
			return 0, s.unexpected(c)
		}
		if s.hex--; s.hex == 0 {
			s.state = inString
		}
		return 1, nil
	case inLiteral:
		if c != s.rest[0] {
			return 0, s.unexpected(c)
		}
		if s.rest = s.rest[1:]; s.rest == "" {
			s.valueEnd()
		}
		return 1, nil
	}
	return s.number(c)
}

// begin handles the first byte of a value.
func (s *jsonScanner) begin(c byte, at int) error {
	switch c {
	case '{':
		return s.push(true)
	case '[':
		return s.push(false)
	case '"':
		s.state, s.after = inString, s.nextState()
	case 't':
		s.state, s.rest = inLiteral, "rue"
	case 'f':
		s.state, s.rest = inLiteral, "alse"
	case 'n':
		s.state, s.rest = inLiteral, "ull"
	case '-':
		s.state = numMinus
	case '0':
		s.state = numZero
	case ' ', '\t', '\n', '\r':
	default:
		switch {
		case isDigit(c):
			s.state = numInt
		case c == ']' && s.state == wantElement:
			s.pop(at)
		default:
			return s.unexpected(c)
		}
	}
	return nil
}

func (s *jsonScanner) number(c byte) (int, error) {
	digit := isDigit(c)
	switch {
	case s.state == numMinus && c == '0':
		s.state = numZero
	case (s.state == numMinus || s.state == numInt) && digit:
		s.state = numInt
	case (s.state == numZero || s.state == numInt) && c == '.':
		s.state = numPoint
	case (s.state == numPoint || s.state == numFrac) && digit:
		s.state = numFrac
	case (s.state == numZero || s.state == numInt || s.state == numFrac) && c|0x20 == 'e':
		s.state = numExp
	case s.state == numExp && (c == '+' || c == '-'):
		s.state = numExpSign
	case (s.state == numExp || s.state == numExpSign || s.state == numExpInt) && digit:
		s.state = numExpInt
	case s.state == numMinus || s.state == numPoint || s.state == numExp || s.state == numExpSign:
		return 0, s.unexpected(c)
	default:
		s.valueEnd()
		return 0, nil
	}
	return 1, nil
}

func (s *jsonScanner) nextState() uint8 {
	if s.depth == 0 {
		return scanDone
	}
	return wantNext
}

func (s *jsonScanner) valueEnd() { s.state = s.nextState() }

func (s *jsonScanner) push(object bool) error {
	if s.depth == maxJSONDepth {
		return fmt.Errorf("JSON nested more than %d deep: %w", maxJSONDepth, ErrMalformed)
	}
	if s.depth == 1 {
		s.direct++
	}
	word := &s.near
	if s.depth >= 64 {
		k := s.depth/64 - 1
		if k == len(s.far) {
			s.far = append(s.far, 0)
		}
		word = &s.far[k]
	}
	bit := uint64(1) << (s.depth % 64)
	*word &^= bit
	if object {
		*word |= bit
		s.state, s.firstKey = wantKey, true
	} else {
		s.state = wantElement
	}
	s.depth++
	s.object = object
	return nil
}

// pop closes the innermost container with the byte at offset at of this call.
func (s *jsonScanner) pop(at int) {
	s.depth--
	if s.depth == 0 {
		s.state = scanDone
		return
	}
	if s.depth == 1 {
		s.closed = s.base + at + 1
	}
	k := s.depth - 1
	word := s.near
	if k >= 64 {
		word = s.far[k/64-1]
	}
	s.object = word>>(k%64)&1 == 1
	s.state = wantNext
}

func (s *jsonScanner) unexpected(c byte) error {
	return fmt.Errorf("unexpected byte %q in JSON: %w", c, ErrMalformed)
}

// plainRun counts the bytes before the first that is special inside a string: a
// quote, a backslash or a control character. It looks at eight bytes at a time.
func plainRun(p []byte) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	i := 0
	for ; i+8 <= len(p); i += 8 {
		v := binary.LittleEndian.Uint64(p[i:])
		quote, slash := v^(ones*'"'), v^(ones*'\\')
		// Each term marks its first hit exactly; later marks may be carries.
		mask := (quote-ones)&^quote | (slash-ones)&^slash | (v-ones*0x20)&^v
		if mask &= highs; mask != 0 {
			return i + bits.TrailingZeros64(mask)/8
		}
	}
	for ; i < len(p); i++ {
		if c := p[i]; c == '"' || c == '\\' || c < 0x20 {
			break
		}
	}
	return i
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }

func isDigit(c byte) bool { return '0' <= c && c <= '9' }
