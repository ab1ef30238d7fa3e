// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"

	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
)

// An expression can name the object many times at next to no cost, so a value is bounded
// when it is copied: in bytes, of which each element takes some by itself. The API server
// stores no object that is as large.
const (
	maxValue    = 4 << 20
	elementSize = 16
)

var errTooLarge = fmt.Errorf("is larger than %d bytes", maxValue)

// native makes of a value what encoding/json makes of JSON. Nothing in it is shared with
// the object.
func native(v ref.Val) (any, error) {
	left := maxValue
	return nativeOf(v, &left)
}

func nativeOf(v ref.Val, left *int) (any, error) {
	*left -= elementSize
	if *left < 0 {
		return nil, errTooLarge
	}
	switch v := v.(type) {
	case types.Null:
		return nil, nil
	case types.Bool:
		return bool(v), nil
	case types.Int:
		return int64(v), nil
	case types.Uint:
		if v > math.MaxInt64 {
			return nil, errors.New("is a number that is too large")
		}
		return int64(v), nil
	case types.Double:
		if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
			return nil, errors.New("is not a number")
		}
		return float64(v), nil
	case types.String:
		*left -= len(v)
		return string(v), nil
	case types.Bytes:
		*left -= len(v)
		return base64.StdEncoding.EncodeToString(v), nil
	case types.Timestamp, types.Duration:
		return nativeOf(v.ConvertToType(types.StringType), left)
	case traits.Lister:
		return nativeList(v, left)
	case traits.Mapper:
		return nativeMap(v, left)
	}
	return nil, fmt.Errorf("is or holds %s, which JSON has not", v.Type().TypeName())
}

func nativeList(v traits.Lister, left *int) (any, error) {
	list := []any{}
	for it := v.Iterator(); it.HasNext() == types.True; {
		element, err := nativeOf(it.Next(), left)
		if err != nil {
			return nil, err
		}
		list = append(list, element)
	}
	return list, nil
}

func nativeMap(v traits.Mapper, left *int) (any, error) {
	m := map[string]any{}
	for it := v.Iterator(); it.HasNext() == types.True; {
		key := it.Next()
		name, ok := key.(types.String)
		if !ok {
			return nil, fmt.Errorf("has a key that is %s, not string", key.Type().TypeName())
		}
		*left -= len(name)
		value, err := nativeOf(v.Get(key), left)
		if err != nil {
			return nil, err
		}
		m[string(name)] = value
	}
	return m, nil
}
