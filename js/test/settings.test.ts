import { expect, it } from 'vitest';
import schema from '../../schema/plugin.json';
import { read } from '../src/lab/settings.js';

const DEFAULTS = Object.fromEntries(
  Object.entries(schema.properties).map(([key, property]) => [key, property.default]),
);

it('has the same defaults as the schema', () => {
  expect(read({})).toEqual(read(DEFAULTS));
  expect(read()).toEqual(read(DEFAULTS));
});

it('reads each setting of the schema', () => {
  for (const [key, property] of Object.entries(schema.properties)) {
    const other = {
      number: (property.default as number) + 0.5,
      boolean: !property.default,
    }[property.type];
    expect(read({ ...DEFAULTS, [key]: other }), key).not.toEqual(read(DEFAULTS));
  }
});
